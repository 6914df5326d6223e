//! `glm run`: one prompt, the answer streamed to stdout.
#![forbid(unsafe_code)]

use std::io::{IsTerminal, Stderr, StdoutLock, Write};
use std::path::Path;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result};
use serde_json::{Value, json};

use super::{
    Outcome, Usage, cancel_flag, human_bytes, lossy_json, lossy_text, open_engine, print_json,
    progress_bar, rate, read_text, round, stderr_line, stream_json, stream_text,
};
use crate::cli::RunArgs;
use crate::engine::{
    Channel, Engine, Event, Finish, Generation, Progress, Request, Session, TokenEvent,
};
use crate::model::{Cancelled, Phase, Profile};
use crate::sample::SampleParams;
use crate::sys;
use crate::template::RenderOptions;

/// Runs the command.
pub(super) fn run(args: &RunArgs) -> Result<Outcome> {
    let prompt = prompt_text(args)?;
    if !args.raw && prompt.trim().is_empty() {
        return Err(Usage("the prompt is empty".to_owned()).into());
    }
    let cancel = cancel_flag()?;
    let engine = open_engine(&args.engine)?;
    let request = request(args, &engine, &prompt)?;
    let (prompt_len, max_tokens) = (request.prompt.len(), request.max_tokens);
    let seed = request.params.seed;

    let mut session = engine.session();
    let bar = progress_bar(
        args.engine.quiet || prompt_len < 64,
        Some(prompt_len as u64),
        "reading the prompt",
    );
    let started = Instant::now();
    let show: &mut Progress<'_> = &mut |done, _| bar.set_position(done as u64);
    let prefill = session.prefill(&engine, &request.prompt, Some(cancel), Some(show));
    bar.finish_and_clear();
    match prefill {
        Err(e) if e.is::<Cancelled>() => return Ok(Outcome::Interrupted),
        other => other?,
    }
    let prefill_s = started.elapsed().as_secs_f64();

    let generation = Generation::new(&engine, &mut session, request, cancel)?;
    let answer = stream(generation, args)?;
    let wall = started.elapsed();
    if let Err(e) = engine.save_usage() {
        stderr_line(&format!("warning: {e:#}"));
    }
    let (prompt_tokens, engine) = (prompt_len, &engine);
    let stats = Stats { prompt_tokens, prefill_s, wall, answer: &answer, seed, engine };
    if args.json {
        print_json(&stats.json(&session, args, max_tokens))?;
    } else if !args.engine.quiet {
        stderr_line(&stats.line());
    }
    if args.profile && !args.json {
        profile_lines(session.profile(), wall).iter().for_each(|l| stderr_line(l));
    }
    Ok(if answer.finish == Finish::Interrupted { Outcome::Interrupted } else { Outcome::Done })
}

/// The prompt as typed, from a file, or from stdin.
fn prompt_text(args: &RunArgs) -> Result<String> {
    let mut text = match (&args.prompt, &args.file) {
        (Some(p), _) if p != "-" => return Ok(p.clone()),
        (None, Some(file)) => read_text(file)?,
        (prompt, _) => {
            if prompt.is_none() && std::io::stdin().is_terminal() {
                return Err(Usage(
                    "no prompt: give it as an argument, with --file, or on stdin".to_owned(),
                )
                .into());
            }
            read_text(Path::new("-"))?
        }
    };
    // Editors and `echo` end a text with a line break that is not meant as part of the question.
    if !args.raw && text.ends_with('\n') {
        text.pop();
        if text.ends_with('\r') {
            text.pop();
        }
    }
    Ok(text)
}

fn request(args: &RunArgs, engine: &Engine, prompt: &str) -> Result<Request> {
    let ids = if args.raw {
        engine.encode_raw(prompt, !args.no_prefix)?
    } else {
        let options = RenderOptions {
            enable_thinking: if args.no_think { Some(false) } else { args.think.then_some(true) },
            reasoning_effort: args.effort.clone(),
            ..RenderOptions::default()
        };
        engine.encode_turn(args.system.as_deref(), prompt, &options)?
    };
    let d = &engine.defaults;
    let params = SampleParams {
        temperature: args.temperature.unwrap_or(d.temperature),
        top_k: args.top_k.unwrap_or(d.top_k),
        top_p: args.top_p.unwrap_or(d.top_p),
        min_p: args.min_p.unwrap_or(d.min_p),
        repeat_penalty: args.repeat_penalty.unwrap_or(d.repeat_penalty),
        seed: args.seed.unwrap_or_else(clock_seed),
    };
    Ok(Request {
        prompt: ids,
        params,
        max_tokens: args.max_tokens as usize,
        stop: args.stop.clone(),
        ignore_eos: args.ignore_eos,
        logprobs: args.logprobs.map(usize::from),
        chat: !args.raw,
    })
}

/// A seed that differs from run to run and is short enough to be typed again.
fn clock_seed() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    (now.as_nanos() as u64 ^ u64::from(std::process::id())) & 0xffff_ffff
}

/// What was generated.
struct Answer {
    text: String,
    reasoning: String,
    tokens: Vec<TokenEvent>,
    finish: Finish,
    decode_s: f64,
    passes: usize,
}

/// Runs the generation, printing as it goes unless JSON is wanted.
fn stream(mut generation: Generation<'_>, args: &RunArgs) -> Result<Answer> {
    let mut screen = (!args.json).then(|| Screen::new(!args.engine.quiet));
    let mut answer = Answer {
        text: String::new(),
        reasoning: String::new(),
        tokens: Vec::new(),
        finish: Finish::Stop,
        decode_s: 0.0,
        passes: 0,
    };
    for event in &mut generation {
        match event? {
            Event::Token(token) => answer.tokens.push(token),
            Event::Text(channel, text) => {
                if let Some(screen) = &mut screen {
                    screen.show(channel, &text)?;
                }
                match channel {
                    Channel::Answer => answer.text += &text,
                    Channel::Reasoning => answer.reasoning += &text,
                }
            }
        }
    }
    if let Some(screen) = screen {
        screen.end()?;
    }
    answer.finish = generation.finish.unwrap_or(Finish::Stop);
    answer.decode_s = generation.decode_time.as_secs_f64();
    answer.passes = generation.passes;
    Ok(answer)
}

/// The answer on stdout as it is made, reasoning on stderr, dimmed on a terminal.
struct Screen {
    out: StdoutLock<'static>,
    err: Stderr,
    reasoning: bool,
    dim: bool,
    /// What was shown last, and whether it ended a line.
    last: Option<Channel>,
    line_ended: bool,
}

impl Screen {
    fn new(reasoning: bool) -> Self {
        let (out, err) = (std::io::stdout().lock(), std::io::stderr());
        let colour = std::env::var_os("NO_COLOR").is_none_or(|v| v.is_empty());
        Self {
            out,
            dim: err.is_terminal() && colour,
            err,
            reasoning,
            last: None,
            line_ended: false,
        }
    }

    fn show(&mut self, channel: Channel, text: &str) -> Result<()> {
        match channel {
            Channel::Reasoning if !self.reasoning => return Ok(()),
            Channel::Reasoning => {
                let shown = if self.dim { &format!("\x1b[2m{text}\x1b[0m") } else { text };
                // A closed stderr is nobody's failure.
                let _ = self.err.write_all(shown.as_bytes());
            }
            Channel::Answer => {
                // Reasoning does not end with a line break of its own.
                if self.last == Some(Channel::Reasoning) && !self.line_ended {
                    let _ = writeln!(self.err);
                }
                let written = self.out.write_all(text.as_bytes()).and_then(|()| self.out.flush());
                written.context("cannot write to stdout")?;
            }
        }
        self.last = Some(channel);
        self.line_ended = text.ends_with('\n');
        Ok(())
    }

    /// Ends the last line, so that what follows starts a new one.
    fn end(mut self) -> Result<()> {
        match self.last {
            _ if self.line_ended => {}
            Some(Channel::Reasoning) => drop(writeln!(self.err)),
            _ => writeln!(self.out).context("cannot write to stdout")?,
        }
        self.out.flush().context("cannot write to stdout")
    }
}

/// Figures of one run.
struct Stats<'a> {
    prompt_tokens: usize,
    prefill_s: f64,
    /// Of prompt and answer.
    wall: Duration,
    answer: &'a Answer,
    seed: u64,
    engine: &'a Engine,
}

impl Stats<'_> {
    fn line(&self) -> String {
        let a = self.answer;
        format!(
            "{} prompt tokens at {:.1} tok/s, {} tokens at {:.1} tok/s, {}, peak {}, {}{}{}, seed {}",
            self.prompt_tokens,
            rate(self.prompt_tokens, self.prefill_s),
            a.tokens.len(),
            rate(a.passes, a.decode_s),
            a.finish.name(),
            human_bytes(sys::peak_rss_bytes()),
            self.engine.describe_compute(),
            self.engine.model.stream().map_or_else(String::new, stream_text),
            lossy_text(&self.engine.model),
            self.seed
        )
    }

    fn json(&self, session: &Session, args: &RunArgs, max_tokens: usize) -> Value {
        let a = self.answer;
        let ids: Vec<u32> = a.tokens.iter().map(|t| t.id).collect();
        let prompt_ids = &session.tokens()[..self.prompt_tokens];
        let mut v = json!({
            "model": self.engine.label(),
            "text": a.text,
            "reasoning": a.reasoning,
            "finish_reason": a.finish.name(),
            "prompt_ids": prompt_ids,
            "ids": ids,
            "seed": self.seed,
            "max_tokens": max_tokens,
            "timings": {
                "prompt_tokens": self.prompt_tokens,
                "prefill_s": round(self.prefill_s, 6),
                "prefill_tok_s": round(rate(self.prompt_tokens, self.prefill_s), 2),
                "tokens": a.tokens.len(),
                "decode_passes": a.passes,
                "decode_s": round(a.decode_s, 6),
                "decode_tok_s": round(rate(a.passes, a.decode_s), 2),
            },
            "peak_rss_bytes": sys::peak_rss_bytes(),
            "kernels": self.engine.model.compute.kernels.isa().name(),
            "threads": self.engine.model.compute.pool.threads(),
        });
        if let Some(stream) = self.engine.model.stream() {
            v["experts"] = stream_json(stream);
        }
        if let Some(lossy) = lossy_json(&self.engine.model) {
            v["lossy"] = lossy;
        }
        if args.logprobs.is_some() {
            v["logprobs"] = a.tokens.iter().map(|t| self.logprob_json(t)).collect();
        }
        if args.profile {
            v["profile"] = profile_json(session.profile(), self.wall);
        }
        v
    }

    fn logprob_json(&self, t: &TokenEvent) -> Value {
        let text = |id: u32| self.engine.tokenizer.decode(&[id], false);
        let (logprob, top) =
            t.logprob.as_ref().map_or((None, &[][..]), |(l, top)| (Some(round(*l, 6)), top));
        let top: Vec<Value> = top
            .iter()
            .map(|&(id, l)| json!({"id": id, "text": text(id), "logprob": round(f64::from(l), 6)}))
            .collect();
        json!({"id": t.id, "text": text(t.id), "logprob": logprob, "top": top})
    }
}

fn profile_json(p: &Profile, wall: Duration) -> Value {
    let phases: serde_json::Map<String, Value> = phases(p, wall)
        .map(|(name, time)| (format!("{name}_s"), round(time.as_secs_f64(), 6).into()))
        .collect();
    let wall_s = round(wall.as_secs_f64(), 6);
    json!({"passes": p.passes, "rows": p.rows, "wall_s": wall_s, "phases": phases})
}

fn profile_lines(p: &Profile, wall: Duration) -> Vec<String> {
    let total = wall.as_secs_f64();
    let mut lines = vec![format!("profile: {} passes, {} rows, {total:.3} s", p.passes, p.rows)];
    lines.extend(phases(p, wall).map(|(name, time)| {
        let s = time.as_secs_f64();
        format!("  {name:<10} {s:>9.3} s {:>5.1}%", 100.0 * s / total.max(1e-12))
    }));
    lines
}

/// The phases of passes, and what of the wall time was spent between passes: sampling, text, progress.
fn phases(p: &Profile, wall: Duration) -> impl Iterator<Item = (&'static str, Duration)> {
    let between = ("sampling", wall.saturating_sub(p.sum()));
    Phase::ALL.iter().map(|&ph| (ph.name(), p.total(ph))).chain([between])
}
