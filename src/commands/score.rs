//! `glm score`: teacher-forced log-likelihoods of texts, continuations, choices and id lists.
#![forbid(unsafe_code)]

use std::io::Write;
use std::sync::atomic::AtomicBool;
use std::time::Instant;

use anyhow::{Context, Result, bail, ensure};
use serde_json::{Value, json};

use super::{
    Outcome, Usage, cancel_flag, input_name, lossy_json, lossy_text, open_engine, print_json,
    progress_bar, rate, read_text, round, stderr_line, stream_json,
};
use crate::cli::{InputForm, ScoreArgs};
use crate::engine::{Engine, Session};
use crate::model::Cancelled;
use crate::sample::{argmax, logprob};
use crate::sys;

/// Tokens per window of a text when nothing is said.
const WINDOW: usize = 2048;

/// Runs the command.
pub(super) fn score(args: &ScoreArgs) -> Result<Outcome> {
    let input = read_text(&args.file)?;
    // A byte order mark is no part of the text.
    let input = input.strip_prefix('\u{feff}').unwrap_or(&input);
    let form = args.input.unwrap_or_else(|| detect(input));
    let text_only = [
        ("--window", args.window.is_some()),
        ("--stride", args.stride.is_some()),
        ("--parse-special", args.parse_special),
    ];
    if let (true, Some((flag, _))) =
        (form != InputForm::Text, text_only.iter().find(|(_, set)| *set))
    {
        return Err(Usage(
            format!("{flag} applies to running text, but the input is {form:?}").to_lowercase(),
        )
        .into());
    }
    let cancel = cancel_flag()?;
    let engine = open_engine(&args.engine)?;
    if engine.tokenizer.prefix().is_none() && !args.no_prefix && !args.engine.quiet {
        stderr_line("note: the tokenizer has no [gMASK] and <sop>: sequences get no prefix");
    }
    let mut scorer =
        Scorer { engine: &engine, session: engine.session(), args, cancel, sum: Sum::default() };
    let result = match form {
        InputForm::Text => scorer.text(input),
        InputForm::Jsonl => scorer.jsonl(input),
        InputForm::Ids => scorer.id_lines(input),
    };
    match result {
        Err(e) if e.is::<Cancelled>() => Ok(Outcome::Interrupted),
        other => other.map(|()| Outcome::Done),
    }
}

/// The form of the input, from its first line that is not blank: a JSON object, or integers only. A damaged line of
/// either kind is still of that kind, so that it is refused and not scored as prose.
fn detect(input: &str) -> InputForm {
    let Some(line) = input.lines().map(str::trim).find(|l| !l.is_empty()) else {
        return InputForm::Text;
    };
    let object = serde_json::from_str::<Value>(line).is_ok_and(|v| v.is_object());
    if object || line.starts_with("{\"") {
        return InputForm::Jsonl;
    }
    let integer = |f: &str| {
        let digits = f.strip_prefix('-').unwrap_or(f);
        !digits.is_empty() && digits.bytes().all(|b| b.is_ascii_digit())
    };
    let mut fields = line.split_ascii_whitespace();
    if fields.clone().count() >= 2 && fields.all(integer) {
        InputForm::Ids
    } else {
        InputForm::Text
    }
}

/// What was scored so far.
#[derive(Default)]
struct Sum {
    /// Log-likelihood in nats.
    logprob: f64,
    /// Scored tokens.
    tokens: usize,
    /// Bytes of the scored tokens' text.
    bytes: usize,
    /// Tokens that went through the model.
    processed: usize,
}

/// Log-likelihood of the last tokens of one sequence.
struct Scored {
    logprob: f64,
    tokens: usize,
    /// Bytes of their text.
    bytes: usize,
    /// Every scored token was the likeliest.
    greedy: bool,
}

struct Scorer<'a> {
    engine: &'a Engine,
    session: Session,
    args: &'a ScoreArgs,
    cancel: &'a AtomicBool,
    sum: Sum,
}

impl Scorer<'_> {
    /// Ids of `[gMASK]<sop>`, unless they are not wanted, not known, or already at the front of `ids`.
    fn prefix_for(&self, ids: &[u32]) -> Vec<u32> {
        let prefix =
            self.engine.tokenizer.prefix().filter(|p| !self.args.no_prefix && !ids.starts_with(p));
        prefix.into_iter().flatten().collect()
    }

    /// Log-likelihood of `ids[from..]` given what is before. `from` is at least 1.
    fn sequence(&mut self, ids: &[u32], from: usize) -> Result<Scored> {
        let vocab = self.engine.model.config.vocab;
        if let Some(id) = ids.iter().find(|&&id| id as usize >= vocab) {
            bail!("token id {id} is out of range, the vocabulary has {vocab} ids");
        }
        let mut scored = Scored { logprob: 0.0, tokens: ids.len() - from, bytes: 0, greedy: true };
        if scored.tokens == 0 {
            return Ok(scored);
        }
        // A prefix that the last sequence had too keeps its cache: same rows, same bits.
        let input = &ids[..ids.len() - 1];
        let held = self.session.tokens();
        let common = held.iter().zip(input).take_while(|(a, b)| a == b).count().min(from - 1);
        self.session.rewind(common);
        self.session.score(
            self.engine,
            &input[common..],
            from - 1 - common,
            |i, logits| {
                let target = ids[common + i + 1];
                scored.logprob += logprob(logits, target);
                scored.greedy &= argmax(logits) == target;
                Ok(())
            },
            Some(self.cancel),
        )?;
        self.sum.processed += input.len() - common;
        scored.bytes = ids[from..]
            .iter()
            .map(|&id| self.engine.tokenizer.token_bytes(id).len())
            .sum::<usize>();
        Ok(scored)
    }

    /// Counts a sequence towards the averages.
    fn count(&mut self, scored: Scored) -> Scored {
        self.sum.logprob += scored.logprob;
        self.sum.tokens += scored.tokens;
        self.sum.bytes += scored.bytes;
        scored
    }

    fn text(&mut self, text: &str) -> Result<()> {
        let tokenizer = &self.engine.tokenizer;
        let ids = if self.args.parse_special {
            tokenizer.encode_special(text)?
        } else {
            tokenizer.encode_text(text)?
        };
        // One position more than the context can be scored: the last token is only a target.
        let room =
            self.engine.context() + 1 - self.prefix_for(&[]).len().min(self.engine.context());
        let window = self.args.window.map_or(WINDOW.min(room), |w| w as usize);
        if window > room || room < 2 {
            let context = self.engine.context();
            return Err(Usage(format!(
                "a window of {window} tokens does not fit: with its prefix the context of {context} holds {room}"
            ))
            .into());
        }
        let stride = self.args.stride.map_or(window, |s| s as usize);
        if stride > window {
            return Err(Usage(format!(
                "--stride {stride} is longer than the window of {window}: tokens would be left out"
            ))
            .into());
        }
        ensure!(
            ids.len() > 1,
            "{}: {} tokens, nothing to score",
            input_name(&self.args.file),
            ids.len()
        );

        // Whole windows, or the whole text if it is shorter than one.
        let starts: Vec<usize> = if ids.len() < window {
            vec![0]
        } else {
            (0..=ids.len() - window).step_by(stride).collect()
        };
        let bar = progress_bar(self.args.engine.quiet, Some(starts.len() as u64), "scoring");
        let started = Instant::now();
        let mut scored_to = 0;
        for &start in &starts {
            let end = (start + window).min(ids.len());
            let mut sequence = self.prefix_for(&ids[start..end]);
            let prefix = sequence.len();
            sequence.extend_from_slice(&ids[start..end]);
            // Without a prefix the first token of a window has nothing before it.
            let from = (prefix + scored_to.max(start) - start).max(1);
            let scored = self.sequence(&sequence, from)?;
            self.count(scored);
            scored_to = end;
            bar.inc(1);
        }
        bar.finish_and_clear();
        let mut report = self.report(started.elapsed().as_secs_f64());
        report["input"] = "text".into();
        report["windows"] = starts.len().into();
        report["window"] = window.into();
        report["stride"] = stride.into();
        report["text_tokens"] = ids.len().into();
        report["left_out_tokens"] = (ids.len() - scored_to).into();
        self.print(&report, &[])
    }

    fn jsonl(&mut self, input: &str) -> Result<()> {
        let rows: Vec<(usize, &str)> =
            input.lines().enumerate().filter(|(_, l)| !l.trim().is_empty()).collect();
        let bar = progress_bar(self.args.engine.quiet, Some(rows.len() as u64), "scoring");
        let started = Instant::now();
        let (mut results, mut choices, mut correct, mut correct_norm) =
            (Vec::new(), 0usize, 0usize, 0usize);
        let name = input_name(&self.args.file);
        for (line, row) in &rows {
            let at = || format!("{name}: line {}", line + 1);
            let row: Row = parse_row(row).with_context(at)?;
            let value = match row {
                Row::Continuation { context, continuation } => {
                    let s = self.continuation(&context, &continuation).with_context(at)?;
                    let s = self.count(s);
                    json!({"logprob": round(s.logprob, 6), "tokens": s.tokens, "greedy": s.greedy})
                }
                Row::Choices { context, choices: list, gold } => {
                    let mut scores = Vec::new();
                    for (i, choice) in list.iter().enumerate() {
                        let s = self.continuation(&context, choice);
                        scores.push(s.with_context(|| format!("{}: choice {i}", at()))?.logprob);
                    }
                    let norm: Vec<f64> = scores
                        .iter()
                        .zip(&list)
                        .map(|(s, c)| s / c.chars().count().max(1) as f64)
                        .collect();
                    let (best, best_norm) = (best(&scores), best(&norm));
                    choices += 1;
                    correct += usize::from(best == gold);
                    correct_norm += usize::from(best_norm == gold);
                    let logprobs: Vec<f64> = scores.iter().map(|s| round(*s, 6)).collect();
                    json!({"logprobs": logprobs, "choice": best, "choice_norm": best_norm, "gold": gold})
                }
            };
            results.push(value);
            bar.inc(1);
        }
        bar.finish_and_clear();
        ensure!(!results.is_empty(), "{name}: no row to score");
        let mut report = self.report(started.elapsed().as_secs_f64());
        report["input"] = "jsonl".into();
        report["rows"] = results.len().into();
        if choices > 0 {
            report["choice_rows"] = choices.into();
            report["accuracy"] = round(correct as f64 / choices as f64, 6).into();
            report["accuracy_norm"] = round(correct_norm as f64 / choices as f64, 6).into();
        }
        self.print(&report, &results)
    }

    /// Ids are those of the joined text, split where the context's own ids end; spaces at the end of the context
    /// belong to the continuation, where the tokenizer puts them. Where a token reaches across the border, both parts
    /// are encoded on their own.
    fn continuation(&mut self, context: &str, continuation: &str) -> Result<Scored> {
        let tokenizer = &self.engine.tokenizer;
        let context_ids = tokenizer.encode_text(context.trim_end())?;
        let mut ids = tokenizer.encode_text(&format!("{context}{continuation}"))?;
        if !ids.starts_with(&context_ids) {
            ids.clone_from(&context_ids);
            ids.extend(
                tokenizer.encode_text(&format!(
                    "{}{continuation}",
                    &context[context.trim_end().len()..]
                ))?,
            );
        }
        let mut sequence = self.prefix_for(&ids);
        let from = sequence.len() + context_ids.len();
        sequence.extend(ids);
        ensure!(
            from > 0,
            "an empty context without a prefix leaves the first token without anything before it"
        );
        ensure!(from < sequence.len(), "the continuation is empty");
        self.sequence(&sequence, from)
    }

    /// The id form: one result line for each input line, nothing else on stdout.
    fn id_lines(&mut self, input: &str) -> Result<()> {
        let lines: Vec<&str> = input.lines().collect();
        ensure!(!lines.is_empty(), "{}: no line to score", input_name(&self.args.file));
        let bar = progress_bar(self.args.engine.quiet, Some(lines.len() as u64), "scoring");
        let started = Instant::now();
        let mut out = std::io::stdout().lock();
        let mut results = Vec::new();
        for (n, line) in lines.iter().enumerate() {
            let at = format!("{}: line {}", input_name(&self.args.file), n + 1);
            let fields = line.split_ascii_whitespace().map(|f| {
                f.parse().ok().with_context(|| {
                    format!("{at}: `{f}` is not an integer, expected <ctxlen> <contlen> <id> …")
                })
            });
            let fields = fields.collect::<Result<Vec<i64>>>()?;
            let [ctx, cont, ids @ ..] = fields.as_slice() else {
                bail!("{at}: {} fields, expected <ctxlen> <contlen> <id> …", fields.len())
            };
            let total = ctx.saturating_add(*cont);
            // Nothing to score is answered, not refused: harnesses count lines.
            let scored = if total <= 0 || *ctx < 1 || *cont < 0 {
                None
            } else {
                ensure!(
                    total == ids.len() as i64,
                    "{at}: {ctx} + {cont} ids announced, {} found",
                    ids.len()
                );
                let ids = ids
                    .iter()
                    .map(|&id| {
                        u32::try_from(id)
                            .ok()
                            .with_context(|| format!("{at}: token id {id} is out of range"))
                    })
                    .collect::<Result<Vec<u32>>>()?;
                let mut sequence = self.prefix_for(&ids);
                let from = sequence.len() + *ctx as usize;
                sequence.extend(ids);
                let scored = self.sequence(&sequence, from).with_context(|| at.clone())?;
                Some(self.count(scored))
            };
            if self.args.json {
                let s =
                    scored.unwrap_or(Scored { logprob: 0.0, tokens: 0, bytes: 0, greedy: false });
                results.push(
                    json!({"logprob": round(s.logprob, 6), "tokens": s.tokens, "greedy": s.greedy}),
                );
            } else {
                let line = scored.map_or_else(
                    || "0 0 0".to_owned(),
                    |s| format!("{:.6} {} {}", s.logprob, s.tokens, u8::from(s.greedy)),
                );
                writeln!(out, "{line}").context("cannot write to stdout")?;
            }
            out.flush().context("cannot write to stdout")?;
            bar.inc(1);
        }
        bar.finish_and_clear();
        drop(out);
        let mut report = self.report(started.elapsed().as_secs_f64());
        report["input"] = "ids".into();
        report["rows"] = lines.len().into();
        if self.args.json {
            return self.print(&report, &results);
        }
        if !self.args.engine.quiet {
            stderr_line(&self.summary(&report));
        }
        Ok(())
    }

    fn report(&self, seconds: f64) -> Value {
        let s = &self.sum;
        // A figure over nothing is null, not a perfect score.
        let over = |n: usize, x: f64| (n > 0).then(|| round(x / n as f64, 6));
        json!({
            "tokens": s.tokens,
            "bytes": s.bytes,
            "logprob": round(s.logprob, 6),
            "nats_per_token": over(s.tokens, -s.logprob),
            "perplexity": (s.tokens > 0).then(|| round((-s.logprob / s.tokens as f64).exp(), 6)),
            "bits_per_byte": over(s.bytes, -s.logprob / std::f64::consts::LN_2),
            "processed_tokens": s.processed,
            "seconds": round(seconds, 3),
            "tok_s": round(rate(s.processed, seconds), 2),
        })
    }

    fn summary(&self, r: &Value) -> String {
        let f = |key: &str| r[key].as_f64().map_or_else(|| "–".to_owned(), |x| format!("{x:.4}"));
        let mut s = format!(
            "perplexity {}, {} nats/token, {} bits/byte over {} tokens, {:.1} tok/s, {}",
            f("perplexity"),
            f("nats_per_token"),
            f("bits_per_byte"),
            self.sum.tokens,
            r["tok_s"].as_f64().unwrap_or(0.0),
            self.engine.describe_compute()
        );
        s += &lossy_text(&self.engine.model);
        if let Some(n) = r["left_out_tokens"].as_u64().filter(|n| *n > 0) {
            s += &format!("; {n} tokens at the end fill no window and are left out");
        }
        if r.get("accuracy").is_some() {
            let (plain, norm) = (f("accuracy"), f("accuracy_norm"));
            s = format!(
                "accuracy {plain}, length-normalised {norm} over {} rows; {s}",
                r["choice_rows"]
            );
        }
        s
    }

    /// The report on stdout: one line, or JSON with the rows.
    fn print(&self, report: &Value, rows: &[Value]) -> Result<()> {
        if self.args.json {
            let mut v = report.clone();
            v["model"] = self.engine.label().into();
            v["kernels"] = self.engine.model.compute.kernels.isa().name().into();
            v["cpu"] = sys::cpu_name().into();
            if let Some(stream) = self.engine.model.stream() {
                v["experts"] = stream_json(stream);
            }
            if let Some(lossy) = lossy_json(&self.engine.model) {
                v["lossy"] = lossy;
            }
            if !rows.is_empty() {
                v["results"] = rows.into();
            }
            return print_json(&v);
        }
        writeln!(std::io::stdout(), "{}", self.summary(report)).context("cannot write to stdout")
    }
}

enum Row {
    Continuation { context: String, continuation: String },
    Choices { context: String, choices: Vec<String>, gold: usize },
}

fn parse_row(line: &str) -> Result<Row> {
    let v: Value = serde_json::from_str(line).context("not valid JSON")?;
    let text = |key: &str| {
        v.get(key)
            .and_then(Value::as_str)
            .map(str::to_owned)
            .with_context(|| format!("no text `{key}`"))
    };
    let context = text("context")?;
    let Some(choices) = v.get("choices") else {
        ensure!(v.get("continuation").is_some(), "neither `choices` nor `continuation`");
        return Ok(Row::Continuation { context, continuation: text("continuation")? });
    };
    let list = choices.as_array().map(Vec::as_slice).unwrap_or_default();
    let list: Option<Vec<String>> = list.iter().map(|c| c.as_str().map(str::to_owned)).collect();
    let choices = list.filter(|c| !c.is_empty()).context("`choices` is not a list of texts")?;
    let gold = v.get("gold").unwrap_or(&Value::Null);
    let index = gold.as_u64().map(|g| g as usize).filter(|g| *g < choices.len());
    let index = index.with_context(|| {
        format!("`gold` is {gold}, expected the index of a choice, 0 to {}", choices.len() - 1)
    })?;
    Ok(Row::Choices { context, choices, gold: index })
}

/// Index of the largest value, the first on a tie.
fn best(values: &[f64]) -> usize {
    let mut best = 0;
    for (i, v) in values.iter().enumerate() {
        if *v > values[best] {
            best = i;
        }
    }
    best
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_form_is_found_out() {
        assert_eq!(detect("{\"context\": \"a\", \"continuation\": \"b\"}\n"), InputForm::Jsonl);
        assert_eq!(detect("\n2 1 5 6 7\n"), InputForm::Ids);
        assert_eq!(detect("2 1 5 6\n"), InputForm::Ids, "a wrong count is an error, not prose");
        assert_eq!(detect("{\"context\": \"a\""), InputForm::Jsonl, "so is half an object");
        assert_eq!(detect("1984\n"), InputForm::Text);
        assert_eq!(detect("{ braces in prose"), InputForm::Text);
        assert_eq!(detect(""), InputForm::Text);
    }

    #[test]
    fn damaged_rows_are_explained() {
        for (row, word) in [
            ("{", "not valid JSON"),
            ("{\"context\": 3}", "`context`"),
            ("{\"context\": \"a\"}", "neither"),
            ("{\"context\": \"a\", \"choices\": []}", "`choices`"),
            ("{\"context\": \"a\", \"choices\": [\"b\"], \"gold\": 1}", "`gold`"),
        ] {
            let e = format!("{:#}", parse_row(row).err().unwrap());
            assert!(e.contains(word), "{row}: {e}");
        }
    }
}
