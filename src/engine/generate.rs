//! The decode loop as an iterator of events: sampling, stop rules, whole characters, reasoning apart from the answer.
#![forbid(unsafe_code)]

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};

use super::{Engine, Session};
use crate::model::Cancelled;
use crate::sample::{SampleParams, Sampler, log_softmax_top};
use crate::tokenizer::Utf8Stream;

/// What to generate.
#[derive(Clone, Debug)]
pub struct Request {
    /// Prompt ids.
    pub prompt: Vec<u32>,
    /// Sampling.
    pub params: SampleParams,
    /// Most tokens to generate.
    pub max_tokens: usize,
    /// Texts that end the answer and are not part of it. They do not apply to reasoning.
    pub stop: Vec<String>,
    /// Goes on after an end-of-turn id.
    pub ignore_eos: bool,
    /// Alternatives to report per token; `None` reports nothing.
    pub logprobs: Option<usize>,
    /// Splits reasoning from the answer at `</think>`. False treats everything as text.
    pub chat: bool,
}

/// Which part of an answer a piece of text belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Channel {
    /// Before `</think>`.
    Reasoning,
    /// The answer.
    Answer,
}

/// One generated token.
#[derive(Clone, Debug, PartialEq)]
pub struct TokenEvent {
    /// Its id.
    pub id: u32,
    /// Its log-probability and the best alternatives, when asked for.
    pub logprob: Option<(f64, Vec<(u32, f32)>)>,
}

/// What the iterator yields.
#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    /// A token was generated. The end-of-turn id is reported too; it has no text.
    Token(TokenEvent),
    /// Text that is whole and can no longer become part of a stop text.
    Text(Channel, String),
}

/// Why generation ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Finish {
    /// An end-of-turn id or a stop text.
    Stop,
    /// `max_tokens` or the end of the context.
    Length,
    /// The cancel flag.
    Interrupted,
}

impl Finish {
    /// Name in JSON.
    pub fn name(self) -> &'static str {
        match self {
            Self::Stop => "stop",
            Self::Length => "length",
            Self::Interrupted => "interrupted",
        }
    }
}

/// A running generation: iterate until `None`, then look at the totals.
pub struct Generation<'a> {
    engine: &'a Engine,
    session: &'a mut Session,
    cancel: &'a AtomicBool,
    request: Request,
    sampler: Sampler,
    utf8: Utf8Stream,
    channel: Channel,
    end_think: Option<u32>,
    /// Answer text that may be the beginning of a stop text.
    held: String,
    /// What is still to be yielded; an error is the last of it.
    queue: VecDeque<Result<Event>>,
    done: bool,
    /// Generated ids, the end-of-turn id included.
    pub ids: Vec<u32>,
    /// Why it ended: set when the iterator is exhausted without an error.
    pub finish: Option<Finish>,
    /// Time of all steps: passes, sampling, text.
    pub decode_time: Duration,
    /// Decode passes: one less than tokens, the first of which comes from the prompt's logits.
    pub passes: usize,
}

/// Most tokens that room is made for before the first; beyond them the caches grow as they go.
const RESERVE: usize = 1024;

impl<'a> Generation<'a> {
    /// Starts a generation on a session that holds the prompt (see [`Session::prefill`]).
    ///
    /// # Errors
    /// Sampling parameters out of range, or an empty session.
    pub fn new(
        engine: &'a Engine,
        session: &'a mut Session,
        request: Request,
        cancel: &'a AtomicBool,
    ) -> Result<Self> {
        ensure!(!session.tokens().is_empty(), "the prompt has no token");
        let mut sampler = Sampler::new(request.params.clone())?;
        let room = engine.context().saturating_sub(session.tokens().len());
        session.reserve(request.max_tokens.min(room).min(RESERVE));
        session.tokens().iter().for_each(|&id| sampler.accept(id));
        let end_think = engine.tokenizer.control_id("</think>").filter(|_| request.chat);
        // A chat prompt that leaves a think tag open continues inside the reasoning.
        let begin_think = engine.tokenizer.control_id("<think>").filter(|_| request.chat);
        let last_tag = session
            .tokens()
            .iter()
            .rev()
            .find(|&&id| Some(id) == begin_think || Some(id) == end_think);
        let thinking = last_tag.is_some_and(|&id| Some(id) == begin_think);
        Ok(Self {
            engine,
            session,
            cancel,
            sampler,
            utf8: Utf8Stream::default(),
            channel: if thinking { Channel::Reasoning } else { Channel::Answer },
            end_think,
            held: String::new(),
            queue: VecDeque::new(),
            done: false,
            ids: Vec::new(),
            finish: None,
            decode_time: Duration::ZERO,
            passes: 0,
            request,
        })
    }

    /// Generates one token and queues its events.
    fn step(&mut self) -> Result<()> {
        if self.cancel.load(Ordering::Relaxed) {
            return self.end(Finish::Interrupted);
        }
        if self.ids.len() >= self.request.max_tokens {
            return self.end(Finish::Length);
        }
        // The newest token is not in the session yet: it goes in when another one is wanted after it.
        if let Some(&last) = self.ids.last() {
            if self.session.tokens().len() + 1 > self.engine.context() {
                return self.end(Finish::Length);
            }
            match self.session.push(self.engine, last, Some(self.cancel)) {
                Err(e) if e.is::<Cancelled>() => return self.end(Finish::Interrupted),
                other => other?,
            }
            self.passes += 1;
        }
        let logits = self.session.logits();
        // The sampler changes the logits in place.
        let before = self.request.logprobs.map(|k| (log_softmax_top(logits, k), logits.to_vec()));
        let id = self.sampler.sample(logits)?;
        self.sampler.accept(id);
        self.ids.push(id);
        let logprob =
            before.map(|((lse, top), logits)| (f64::from(logits[id as usize]) - lse, top));
        self.queue.push_back(Ok(Event::Token(TokenEvent { id, logprob })));

        if !self.request.ignore_eos && self.engine.stops().contains(&id) {
            return self.end(Finish::Stop);
        }
        if self.channel == Channel::Reasoning && Some(id) == self.end_think {
            self.flush();
            self.channel = Channel::Answer;
            return Ok(());
        }
        let tokenizer = &self.engine.tokenizer;
        if !tokenizer.is_special(id) {
            let text = self.utf8.push(tokenizer.token_bytes(id));
            if self.emit(&text) {
                // What follows the stop text is not part of the answer, not even half a character.
                self.utf8 = Utf8Stream::default();
                return self.end(Finish::Stop);
            }
        }
        Ok(())
    }

    /// Queues text, holding back what may become a stop text. True when a stop text is complete.
    fn emit(&mut self, text: &str) -> bool {
        if self.channel == Channel::Reasoning || self.request.stop.is_empty() {
            self.queue_text(text.to_owned());
            return false;
        }
        self.held += text;
        let stops = &self.request.stop;
        if let Some(at) = stops.iter().filter_map(|s| self.held.find(s.as_str())).min() {
            let keep = self.held[..at].to_owned();
            self.held.clear();
            self.queue_text(keep);
            return true;
        }
        let hold = stops.iter().map(|s| overlap(&self.held, s)).max().unwrap_or(0);
        let free: String = self.held.drain(..self.held.len() - hold).collect();
        self.queue_text(free);
        false
    }

    fn queue_text(&mut self, text: String) {
        if !text.is_empty() {
            self.queue.push_back(Ok(Event::Text(self.channel, text)));
        }
    }

    /// Releases what is held: at a change of channel and at the end.
    fn flush(&mut self) {
        let rest = self.utf8.finish();
        self.held += &rest;
        let held = std::mem::take(&mut self.held);
        self.queue_text(held);
    }

    fn end(&mut self, finish: Finish) -> Result<()> {
        self.flush();
        self.finish = Some(finish);
        self.done = true;
        Ok(())
    }
}

impl Iterator for Generation<'_> {
    type Item = Result<Event>;

    fn next(&mut self) -> Option<Result<Event>> {
        loop {
            if let Some(event) = self.queue.pop_front() {
                return Some(event);
            }
            if self.done {
                return None;
            }
            let started = Instant::now();
            let step = self.step();
            self.decode_time += started.elapsed();
            if let Err(e) = step {
                // What was generated comes first; after the error nothing does.
                self.flush();
                self.queue.push_back(Err(e));
                self.done = true;
            }
        }
    }
}

/// Longest proper prefix of `stop`, in bytes, that `text` ends with.
fn overlap(text: &str, stop: &str) -> usize {
    let longest = text.len().min(stop.len().saturating_sub(1));
    (1..=longest)
        .rev()
        .find(|&n| stop.is_char_boundary(n) && text.ends_with(&stop[..n]))
        .unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::overlap;

    #[test]
    fn overlap_is_the_longest_prefix_at_the_end() {
        assert_eq!(overlap("abc##", "###"), 2);
        assert_eq!(overlap("abc", "###"), 0);
        assert_eq!(overlap("", "x"), 0);
        assert_eq!(overlap("a", "a"), 0, "a whole stop text is found, not held");
        assert_eq!(overlap("né", "éa"), 2);
    }
}
