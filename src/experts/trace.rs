//! The routing trace: which experts rows were sent to, as text that `glm replay` reads.
//!
//! One line per row and sparse layer: `<call> <row> <layer> <id>:<gate> …`. A call is one sparse layer of one pass; calls
//! count from 0 in the order of computation, rows from 0 inside a call.
#![forbid(unsafe_code)]

use std::fs::File;
use std::io::{self, BufRead, BufWriter, Write};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};

/// Writes a trace.
pub struct Recorder {
    out: BufWriter<File>,
    path: PathBuf,
    call: u64,
    row: usize,
    /// The layer of the running call; `None` before the first of a pass.
    layer: Option<usize>,
    /// The first error; nothing is written after it.
    failed: Option<io::Error>,
}

impl Recorder {
    /// Starts a trace; what the file held is gone.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn create(path: &Path) -> Result<Self> {
        let file =
            File::create(path).with_context(|| format!("cannot write {}", path.display()))?;
        let out = BufWriter::with_capacity(1 << 20, file);
        Ok(Self { out, path: path.to_owned(), call: 0, row: 0, layer: None, failed: None })
    }

    /// Takes the route of the next row of a layer.
    pub fn routed(&mut self, layer: usize, route: &[(u32, f32)]) {
        match self.layer {
            Some(running) if running == layer => self.row += 1,
            running => {
                self.call += u64::from(running.is_some());
                self.row = 0;
                self.layer = Some(layer);
            }
        }
        if self.failed.is_none() {
            self.failed = self.line(layer, route).err();
        }
    }

    fn line(&mut self, layer: usize, route: &[(u32, f32)]) -> io::Result<()> {
        write!(self.out, "{} {} {layer}", self.call, self.row)?;
        for (id, gate) in route {
            write!(self.out, " {id}:{gate:.4}")?;
        }
        self.out.write_all(b"\n")
    }

    /// Ends a pass: all of it is in the file.
    ///
    /// # Errors
    /// Something since the last call could not be written.
    pub fn end_pass(&mut self) -> Result<()> {
        self.call += u64::from(self.layer.take().is_some());
        let result = self.failed.take().map_or_else(|| self.out.flush(), Err);
        result.with_context(|| format!("cannot write {}", self.path.display()))
    }
}

/// Most layers and experts per layer of a trace.
const MAX_LAYERS: u32 = 1024;
const MAX_EXPERTS: u32 = 4096;

/// What a trace asks of the slots: calls in order, each with the distinct experts that its layer needs.
#[derive(Default)]
pub struct Accesses {
    layers: Vec<u32>,
    /// Where the experts of each call end in `ids`.
    ends: Vec<usize>,
    ids: Vec<u32>,
}

impl Accesses {
    /// Adds a call for the distinct experts of `ids`.
    pub fn push(&mut self, layer: u32, ids: &mut Vec<u32>) {
        ids.sort_unstable();
        ids.dedup();
        self.layers.push(layer);
        self.ids.extend_from_slice(ids);
        self.ends.push(self.ids.len());
    }

    /// Layer and experts of each call.
    pub fn calls(&self) -> impl Iterator<Item = (u32, &[u32])> {
        let starts = std::iter::once(0).chain(self.ends.iter().copied());
        let ranges = starts.zip(&self.ends);
        self.layers.iter().zip(ranges).map(|(&layer, (start, &end))| (layer, &self.ids[start..end]))
    }

    /// Experts wanted, over all calls.
    pub fn wanted(&self) -> usize {
        self.ids.len()
    }

    /// The layers that occur, ascending.
    pub fn layers(&self) -> Vec<u32> {
        let mut layers = self.layers.clone();
        layers.sort_unstable();
        layers.dedup();
        layers
    }

    /// The experts of a layer, as far as they can be seen: one more than the highest id.
    pub fn experts(&self) -> u32 {
        self.ids.iter().max().map_or(0, |id| id + 1)
    }

    /// Reads a trace. With `rows`, a pass of many rows counts as many passes of one row: what decoding the same tokens
    /// would have asked for.
    ///
    /// # Errors
    /// The file cannot be read, or a line is none of a trace; the error names `name` and the line.
    pub fn read(mut input: impl BufRead, name: &str, rows: bool) -> Result<Self> {
        let mut accesses = Self::default();
        let mut pass = Pass::default();
        let mut last: Option<Head> = None;
        let mut bytes = Vec::new();
        for number in 1usize.. {
            bytes.clear();
            let read = input.read_until(b'\n', &mut bytes);
            if read.with_context(|| format!("cannot read {name}"))? == 0 {
                break;
            }
            let line = parse(&bytes, &mut pass.ids).with_context(|| {
                let text = String::from_utf8_lossy(bytes.trim_ascii_end());
                let text: String = text.chars().take(60).collect();
                format!(
                    "{name}:{number}: found `{text}`, expected `<call> <row> <layer> <id>:<gate> …`"
                )
            });
            let head = line?;
            let Head { call, row, layer } = head;
            let next = match last {
                None => row == 0,
                Some(l) if call == l.call => row == l.row + 1 && layer == l.layer,
                Some(l) => call == l.call + 1 && row == 0,
            };
            ensure!(
                next,
                "{name}:{number}: found call {call}, row {row}, layer {layer}, expected {}",
                last.map_or_else(|| "row 0".to_owned(), Head::expected)
            );
            if last.is_some_and(|l| l.call != call && layer <= l.layer) {
                pass.end(rows, &mut accesses);
            }
            pass.lines.push((head, pass.ids.len()));
            last = Some(head);
        }
        pass.end(rows, &mut accesses);
        Ok(accesses)
    }
}

/// The numbers in front of a line.
#[derive(Clone, Copy)]
struct Head {
    call: u64,
    row: u64,
    layer: u32,
}

impl Head {
    fn expected(self) -> String {
        let Self { call, row, layer } = self;
        format!("call {call}, row {}, layer {layer} or call {}, row 0", row + 1, call + 1)
    }
}

/// The head of a line; its experts are added to `ids`.
fn parse(line: &[u8], ids: &mut Vec<u32>) -> Result<Head> {
    let text =
        std::str::from_utf8(line)?.strip_suffix('\n').context("the file ends inside a line")?;
    let mut fields = text.split(' ');
    let mut number = |what| fields.next().and_then(|f| f.parse().ok()).context(what);
    let (call, row) = (number("no call")?, number("no row")?);
    let layer = u32::try_from(number("no layer")?).unwrap_or(u32::MAX);
    ensure!(layer < MAX_LAYERS, "layer {layer} is not below {MAX_LAYERS}");
    let first = ids.len();
    for field in fields {
        let (id, gate) = field.split_once(':').context("an expert without a gate")?;
        let id = id.parse().ok().filter(|&id| id < MAX_EXPERTS);
        let id = id.with_context(|| format!("an expert's id is not below {MAX_EXPERTS}"))?;
        gate.parse::<f32>().ok().filter(|g| g.is_finite()).context("a gate is no number")?;
        ids.push(id);
    }
    ensure!(ids.len() > first, "no experts");
    Ok(Head { call, row, layer })
}

/// The lines of one pass, until it is known to be complete.
#[derive(Default)]
struct Pass {
    /// Each line with the end of its experts in `ids`.
    lines: Vec<(Head, usize)>,
    ids: Vec<u32>,
}

impl Pass {
    fn end(&mut self, rows: bool, accesses: &mut Accesses) {
        // The ids of the first line of the next pass may be there already.
        let used = self.lines.last().map_or(0, |&(_, end)| end);
        let mut order: Vec<usize> = (0..self.lines.len()).collect();
        if rows {
            order.sort_by_key(|&i| self.lines[i].0.row);
        }
        let same = |&a: &usize, &b: &usize| !rows && self.lines[a].0.call == self.lines[b].0.call;
        let mut ids = Vec::new();
        for lines in order.chunk_by(same) {
            ids.clear();
            for &i in lines {
                let start = if i == 0 { 0 } else { self.lines[i - 1].1 };
                ids.extend_from_slice(&self.ids[start..self.lines[i].1]);
            }
            accesses.push(self.lines[lines[0]].0.layer, &mut ids);
        }
        self.ids.drain(..used);
        self.lines.clear();
    }
}
