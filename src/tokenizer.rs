#![forbid(unsafe_code)]
//! Text to token ids and back.
//!
//! Owns the byte-level BPE of a `tokenizer.json`, the control tokens (its `added_tokens`) and the
//! bytes of every id. The BPE itself (the `tokenizers` crate) never sees a control token:
//! [`Tokenizer::encode_text`] turns any text into ordinary tokens, and only [`Tokenizer::encode`],
//! meant for rendered chat templates, reads control tokens. Text of a user goes through
//! [`Tokenizer::escape`] before it enters a template, so that a literal `<|user|>` in it stays
//! text. Knows nothing of chat formats or models.

use std::borrow::Cow;
use std::collections::{BTreeSet, HashMap};
use std::fmt::Write as _;

use aho_corasick::{AhoCorasick, MatchKind};
use anyhow::{Context as _, Result, anyhow, bail, ensure};
use serde::Deserialize;
use serde_json::value::RawValue;
use tokenizers::models::bpe::{BPE, Vocab};
use tokenizers::{
    DecoderWrapper, NormalizerWrapper, PostProcessorWrapper, PreTokenizerWrapper, TokenizerBuilder,
};

/// Breaks up a control token in escaped text; alone it stands for nothing.
const MARK: char = '\u{fdd0}';
/// After [`MARK`]: the pair stands for a literal U+FDD0.
const LITERAL: char = '\u{fdd1}';
/// After [`MARK`]: the pair stands for nothing, whatever follows it. Used at the borders of a text,
/// where the next character is not known.
const CLOSED: char = '\u{fdd2}';

/// Pre-tokenizers and normalizers that byte-level models use. Others of the library panic on parts
/// they do not expect, such as a length of 0 or a damaged table.
const PRE_TOKENIZERS: [&str; 4] = ["Sequence", "Split", "Digits", "ByteLevel"];
const NORMALIZERS: [&str; 5] = ["Sequence", "NFC", "NFD", "NFKC", "NFKD"];

const MAX_ID: u32 = 1 << 24;
const MAX_JSON_BYTES: usize = 1 << 30;

type Bpe = tokenizers::TokenizerImpl<
    BPE,
    NormalizerWrapper,
    PreTokenizerWrapper,
    PostProcessorWrapper,
    DecoderWrapper,
>;

/// A byte-level BPE tokenizer with control tokens.
pub struct Tokenizer {
    bpe: Bpe,
    controls: Vec<Control>,
    /// Finds the control tokens of a rendered template; pattern i is `controls[i]`.
    longest: AhoCorasick,
    /// Finds every occurrence, overlapping ones too; same patterns.
    all: AhoCorasick,
    by_content: HashMap<String, u32>,
    kinds: Vec<Kind>,   // (vocab_len)
    offsets: Vec<u32>,  // (vocab_len + 1) into `bytes`
    bytes: Vec<u8>,     // of all tokens, by id
    byte_ids: Vec<u32>, // (256) id of the token that is one byte
}

struct Control {
    id: u32,
    content: String,
}

#[derive(Clone, Copy, PartialEq)]
enum Kind {
    Text,
    Control,
    Special,
}

/// The parts of `tokenizer.json` that are used; the rest is ignored.
#[derive(Deserialize)]
struct File<'a> {
    #[serde(borrow)]
    model: Option<&'a RawValue>,
    #[serde(borrow)]
    added_tokens: Option<&'a RawValue>,
    #[serde(borrow)]
    normalizer: Option<&'a RawValue>,
    #[serde(borrow)]
    pre_tokenizer: Option<&'a RawValue>,
    #[serde(borrow)]
    decoder: Option<&'a RawValue>,
}

#[derive(Deserialize)]
struct Model {
    #[serde(rename = "type")]
    kind: Option<String>,
    vocab: Option<HashMap<String, i64>>,
    #[serde(default)]
    merges: Vec<Merge>,
    dropout: Option<f32>,
    continuing_subword_prefix: Option<String>,
    end_of_word_suffix: Option<String>,
    #[serde(default)]
    ignore_merges: bool,
}

/// A merge as written by newer (pair) and older (one string) versions.
#[derive(Deserialize)]
#[serde(untagged)]
enum Merge {
    Pair(String, String),
    Joined(String),
}

#[derive(Deserialize)]
struct Added {
    id: i64,
    content: String,
    #[serde(default)]
    single_word: bool,
    #[serde(default)]
    lstrip: bool,
    #[serde(default)]
    rstrip: bool,
    #[serde(default)]
    special: bool,
}

/// A decoder, normalizer or pre-tokenizer by its name, with its parts if it is a sequence.
#[derive(Deserialize)]
struct Tag {
    #[serde(rename = "type")]
    kind: Option<String>,
    #[serde(default)]
    pretokenizers: Vec<Tag>,
    #[serde(default)]
    normalizers: Vec<Tag>,
}

impl Tag {
    fn is_byte_level(&self) -> bool {
        self.kind.as_deref() == Some("ByteLevel")
    }

    /// Refuses this and every part of it that is not in `allowed`.
    fn check_kinds(&self, allowed: &[&str]) -> Result<()> {
        let name = name_of(Some(self));
        ensure!(allowed.contains(&name), "{name}, expected one of {}", allowed.join(", "));
        let mut parts = self.pretokenizers.iter().chain(&self.normalizers);
        parts.try_for_each(|p| p.check_kinds(allowed))
    }
}

impl Tokenizer {
    /// Reads a `tokenizer.json`; `source` is its name in messages.
    ///
    /// # Errors
    /// Fails if the text is not JSON, is not a byte-level BPE tokenizer, or contradicts itself.
    pub fn from_bytes(json: &[u8], source: &str) -> Result<Self> {
        Self::parse(json).with_context(|| format!("cannot read tokenizer {source}"))
    }

    fn parse(json: &[u8]) -> Result<Self> {
        let n = json.len();
        ensure!(n <= MAX_JSON_BYTES, "size: {n} bytes, expected at most {MAX_JSON_BYTES}");
        let file: File = serde_json::from_slice(json).context("not a tokenizer JSON object")?;
        check_byte_level(file.pre_tokenizer, file.decoder)?;
        let normalizer: Option<Tag> = part(file.normalizer).context("normalizer")?;
        normalizer.map_or(Ok(()), |n| n.check_kinds(&NORMALIZERS)).context("normalizer")?;

        let model = file.model.context("model: missing, expected a BPE model")?;
        let model: Model = serde_json::from_str(model.get()).context("model")?;
        let added: Vec<Added> = match file.added_tokens {
            Some(raw) => serde_json::from_str(raw.get()).context("added_tokens")?,
            None => Vec::new(),
        };
        let vocab = model.checked_vocab()?;
        let added = checked_added(added, &vocab)?;

        // Bytes by id. Sorting makes the first of two holders of an id the same in every run.
        let mut tokens: Vec<(u32, &str, Kind)> =
            vocab.iter().map(|(t, &id)| (id, t.as_str(), Kind::Text)).collect();
        for a in &added {
            let kind = if a.special { Kind::Special } else { Kind::Control };
            tokens.push((a.id as u32, &a.content, kind));
        }
        tokens.sort_unstable_by_key(|&(id, text, kind)| (id, text, kind == Kind::Text));
        // An added token may be in the vocabulary too, under the same id: the added one counts.
        tokens.dedup_by(|b, a| a.0 == b.0 && a.1 == b.1);
        if let Some(w) = tokens.windows(2).find(|w| w[0].0 == w[1].0) {
            bail!("id {}: held by both {:?} and {:?}", w[0].0, w[0].1, w[1].1);
        }

        let len = tokens.last().map_or(0, |t| t.0 as usize + 1);
        let byte_of = byte_table();
        let mut kinds = vec![Kind::Text; len];
        let mut offsets = Vec::with_capacity(len + 1);
        let mut bytes = Vec::new();
        let mut found = [None; 256];
        for &(id, text, kind) in &tokens {
            offsets.resize(id as usize + 1, bytes.len() as u32);
            kinds[id as usize] = kind;
            match text.chars().map(|c| byte_of.get(&c).copied()).collect::<Option<Vec<u8>>>() {
                Some(raw) if kind == Kind::Text => {
                    if let [byte] = raw[..] {
                        found[usize::from(byte)] = Some(id);
                    }
                    bytes.extend(raw);
                }
                // As Hugging Face does: a token with a character outside the table stands for
                // itself.
                _ => bytes.extend(text.as_bytes()),
            }
        }
        offsets.push(bytes.len() as u32);
        let mut byte_ids = Vec::with_capacity(256);
        for (byte, id) in found.into_iter().enumerate() {
            byte_ids
                .push(id.with_context(|| format!("model.vocab: no token for byte {byte:#04x}"))?);
        }

        let patterns = added.iter().map(|a| a.content.as_str());
        let longest = AhoCorasick::builder()
            .match_kind(MatchKind::LeftmostLongest)
            .build(patterns.clone())
            .context("added_tokens: cannot build the matcher")?;
        let all = AhoCorasick::new(patterns).context("added_tokens: cannot build the matcher")?;
        let mut by_content = HashMap::new();
        let mut controls = Vec::new();
        for a in &added {
            by_content.insert(a.content.clone(), a.id as u32);
            controls.push(Control { id: a.id as u32, content: a.content.clone() });
        }
        let bpe = model.build(vocab, file.normalizer, file.pre_tokenizer)?;
        Ok(Self { bpe, controls, longest, all, by_content, kinds, offsets, bytes, byte_ids })
    }

    /// Highest id of any token plus one.
    pub fn vocab_len(&self) -> usize {
        self.kinds.len()
    }

    /// Encodes plain text: a control token written in it becomes ordinary tokens.
    ///
    /// # Errors
    /// Fails if the split pattern gives up on the text.
    pub fn encode_text(&self, text: &str) -> Result<Vec<u32>> {
        let mut ids = Vec::new();
        self.push_text(text, &mut ids)?;
        Ok(ids)
    }

    /// Encodes a rendered template: control tokens become their ids, the rest is unescaped plain
    /// text.
    ///
    /// # Errors
    /// Fails where [`Tokenizer::encode_text`] does.
    pub fn encode(&self, rendered: &str) -> Result<Vec<u32>> {
        self.encode_pieces(rendered, unescape)
    }

    /// Encodes text whose control tokens are meant as such and in which nothing is escaped, like a
    /// file of training documents. Equals Hugging Face's `encode(text, add_special_tokens=False)`.
    ///
    /// # Errors
    /// Fails where [`Tokenizer::encode_text`] does.
    pub fn encode_special(&self, text: &str) -> Result<Vec<u32>> {
        self.encode_pieces(text, |piece| Cow::Borrowed(piece))
    }

    fn encode_pieces(&self, text: &str, plain: fn(&str) -> Cow<'_, str>) -> Result<Vec<u32>> {
        let mut ids = Vec::new();
        let mut start = 0;
        for m in self.longest.find_iter(text) {
            self.push_text(&plain(&text[start..m.start()]), &mut ids)?;
            ids.push(self.controls[m.pattern().as_usize()].id);
            start = m.end();
        }
        self.push_text(&plain(&text[start..]), &mut ids)?;
        Ok(ids)
    }

    fn push_text(&self, text: &str, ids: &mut Vec<u32>) -> Result<()> {
        if text.is_empty() {
            return Ok(());
        }
        let encoding = self.bpe.encode_fast(text, false).map_err(|e| anyhow!("{e}"));
        let encoding =
            encoding.with_context(|| format!("cannot encode text of {} bytes", text.len()))?;
        for &id in encoding.get_ids() {
            if !self.is_control(id) {
                ids.push(id);
                continue;
            }
            // A vocabulary may list a control token too; text must still never reach its id.
            ids.extend(self.token_bytes(id).iter().map(|&b| self.byte_ids[usize::from(b)]));
        }
        Ok(())
    }

    /// Makes text safe to put into a template: [`Tokenizer::encode`] reads no control token in it,
    /// nor one across its borders, except those named in `keep`.
    ///
    /// U+FDD0 goes after the first character of each control token, and a literal U+FDD0 becomes
    /// U+FDD0 U+FDD1.
    pub fn escape<'a>(&self, text: &'a str, keep: &[&str]) -> Cow<'a, str> {
        let kept = |c: &Control| keep.contains(&c.content.as_str());
        // Byte positions before which a mark goes. A token has two characters at least and none is
        // a mark, so marking the first character of each occurrence leaves no occurrence.
        let mut marks = BTreeSet::new();
        let after_first = |at: usize| at + text[at..].chars().next().map_or(0, char::len_utf8);
        if !text.is_empty() {
            for m in self.all.find_overlapping_iter(text) {
                if !kept(&self.controls[m.pattern().as_usize()]) {
                    marks.insert(after_first(m.start()));
                }
            }
            for c in self.controls.iter().filter(|c| !kept(c)) {
                for (i, _) in c.content.char_indices().skip(1) {
                    if text.ends_with(&c.content[..i]) {
                        marks.insert(after_first(text.len() - i));
                    }
                    if text.starts_with(&c.content[i..]) {
                        marks.insert(0);
                    }
                }
            }
        }
        if marks.is_empty() && !text.contains(MARK) {
            return Cow::Borrowed(text);
        }
        let mut out = String::with_capacity(text.len() + 6 * marks.len() + 6);
        let mut marks = marks.into_iter().peekable();
        for (i, c) in text.char_indices() {
            if marks.next_if_eq(&i).is_some() {
                out.push(MARK);
                // Inside the text a token's own character follows; at the start anything may.
                if i == 0 {
                    out.push(CLOSED);
                }
            }
            out.push(c);
            if c == MARK {
                out.push(LITERAL);
            }
        }
        if marks.next().is_some() {
            out.extend([MARK, CLOSED]);
        }
        Cow::Owned(out)
    }

    /// Undoes [`Tokenizer::escape`]; text without U+FDD0 comes back as it is.
    pub fn unescape(&self, text: &str) -> String {
        unescape(text).into_owned()
    }

    /// Id of the control token with exactly this content.
    pub fn control_id(&self, content: &str) -> Option<u32> {
        self.by_content.get(content).copied()
    }

    /// Whether `id` is a control token flagged special, which `skip_special` leaves out.
    pub fn is_special(&self, id: u32) -> bool {
        self.kinds.get(id as usize) == Some(&Kind::Special)
    }

    /// Whether `id` is a control token, special or not.
    pub fn is_control(&self, id: u32) -> bool {
        self.kinds.get(id as usize).is_some_and(|&k| k != Kind::Text)
    }

    /// The bytes `id` stands for; empty for an id without a token.
    pub fn token_bytes(&self, id: u32) -> &[u8] {
        let i = id as usize;
        match self.offsets.get(i..).and_then(|o| o.first_chunk::<2>()) {
            Some(&[start, end]) => &self.bytes[start as usize..end as usize],
            None => &[],
        }
    }

    /// The text of `ids`; bytes that are not UTF-8 become U+FFFD.
    pub fn decode(&self, ids: &[u32], skip_special: bool) -> String {
        let shown = ids.iter().filter(|&&id| !(skip_special && self.is_special(id)));
        let bytes: Vec<u8> = shown.flat_map(|&id| self.token_bytes(id)).copied().collect();
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// The ids every prompt starts with, `[gMASK]` and `<sop>`, if both exist.
    pub fn prefix(&self) -> Option<[u32; 2]> {
        Some([self.control_id("[gMASK]")?, self.control_id("<sop>")?])
    }
}

impl std::fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tokenizer")
            .field("vocab_len", &self.vocab_len())
            .field("controls", &self.controls.len())
            .finish_non_exhaustive()
    }
}

impl Model {
    /// Takes the vocabulary, checked together with everything the BPE would trip over.
    fn checked_vocab(&self) -> Result<HashMap<String, u32>> {
        if let Some(kind) = self.kind.as_deref().filter(|&k| k != "BPE") {
            bail!("model.type: {kind}, expected BPE");
        }
        let vocab = self.vocab.as_ref().context("model.vocab: missing, expected a map of ids")?;
        ensure!(!vocab.is_empty(), "model.vocab: 0 tokens, expected at least 1");
        let refused = [
            ("continuing_subword_prefix", &self.continuing_subword_prefix),
            ("end_of_word_suffix", &self.end_of_word_suffix),
        ];
        for (name, value) in refused {
            if let Some(text) = value.as_deref().filter(|t| !t.is_empty()) {
                bail!("model.{name}: {text:?}, expected none for a byte-level tokenizer");
            }
        }
        if let Some(p) = self.dropout.filter(|&p| p != 0.0) {
            bail!("model.dropout: {p}, expected none");
        }
        let mut checked = HashMap::with_capacity(vocab.len());
        for (token, &id) in vocab {
            checked.insert(token.clone(), checked_id(token, id)?);
        }
        let mut joined = String::new();
        for (i, merge) in self.merges.iter().enumerate() {
            let (a, b) = merge.parts().with_context(|| format!("model.merges[{i}]"))?;
            joined.clear();
            let _ = write!(joined, "{a}{b}"); // cannot fail on a String
            for part in [a, b, &joined] {
                ensure!(
                    vocab.contains_key(part),
                    "model.merges[{i}]: {part:?} is not in the vocabulary"
                );
            }
        }
        Ok(checked)
    }

    fn build(
        self,
        vocab: HashMap<String, u32>,
        normalizer: Option<&RawValue>,
        pre_tokenizer: Option<&RawValue>,
    ) -> Result<Bpe> {
        let merges = self.merges.into_iter().map(Merge::into_parts).collect::<Result<_>>()?;
        let vocab: Vocab = vocab.into_iter().collect();
        // No unknown token and no byte fallback: every byte has a token.
        let bpe = BPE::builder()
            .vocab_and_merges(vocab, merges)
            .ignore_merges(self.ignore_merges)
            .build()
            .map_err(|e| anyhow!("model: {e}"))?;
        TokenizerBuilder::new()
            .with_model(bpe)
            .with_normalizer(part(normalizer).context("normalizer")?)
            .with_pre_tokenizer(part(pre_tokenizer).context("pre_tokenizer")?)
            .with_post_processor(None)
            .with_decoder(None)
            .build()
            .map_err(|e| anyhow!("cannot build the tokenizer: {e}"))
    }
}

impl Merge {
    fn parts(&self) -> Result<(&str, &str)> {
        match self {
            Self::Pair(a, b) => Ok((a, b)),
            Self::Joined(text) => {
                let split = text.split_once(' ').filter(|(_, b)| !b.contains(' '));
                split.with_context(|| format!("{text:?}, expected two tokens and one space"))
            }
        }
    }

    fn into_parts(self) -> Result<(String, String)> {
        match self {
            Self::Pair(a, b) => Ok((a, b)),
            joined => joined.parts().map(|(a, b)| (a.to_owned(), b.to_owned())),
        }
    }
}

/// Reads a part of the file that may be missing or null.
fn part<T: for<'de> Deserialize<'de>>(raw: Option<&RawValue>) -> Result<Option<T>> {
    match raw {
        Some(raw) => Ok(serde_json::from_str(raw.get())?),
        None => Ok(None),
    }
}

fn check_byte_level(pre_tokenizer: Option<&RawValue>, decoder: Option<&RawValue>) -> Result<()> {
    let tag: Option<Tag> = part(decoder).context("decoder")?;
    if !tag.as_ref().is_some_and(Tag::is_byte_level) {
        bail!("decoder: {}, expected ByteLevel", name_of(tag.as_ref()));
    }
    let tag: Option<Tag> = part(pre_tokenizer).context("pre_tokenizer")?;
    let byte_level = |t: &Tag| t.is_byte_level() || t.pretokenizers.iter().any(Tag::is_byte_level);
    if !tag.as_ref().is_some_and(byte_level) {
        bail!("pre_tokenizer: {} without ByteLevel, expected one with it", name_of(tag.as_ref()));
    }
    tag.map_or(Ok(()), |t| t.check_kinds(&PRE_TOKENIZERS)).context("pre_tokenizer")
}

fn name_of(tag: Option<&Tag>) -> &str {
    tag.and_then(|t| t.kind.as_deref()).unwrap_or("missing")
}

fn checked_id(token: &str, id: i64) -> Result<u32> {
    let small = u32::try_from(id).ok().filter(|&id| id <= MAX_ID);
    small.with_context(|| format!("token {token:?}: id {id}, expected 0 to {MAX_ID}"))
}

/// Drops empty and repeated added tokens and refuses those this module cannot honour.
fn checked_added(added: Vec<Added>, vocab: &HashMap<String, u32>) -> Result<Vec<Added>> {
    let mut ids = HashMap::new();
    let mut kept = Vec::with_capacity(added.len());
    for a in added {
        let Added { id, content, .. } = &a;
        if content.is_empty() {
            continue;
        }
        let id = checked_id(content, *id)?;
        let flags = [("single_word", a.single_word), ("lstrip", a.lstrip), ("rstrip", a.rstrip)];
        if let Some((flag, _)) = flags.into_iter().find(|f| f.1) {
            bail!("added token {content:?}: {flag} is true, expected false");
        }
        ensure!(
            content.chars().nth(1).is_some(),
            "added token {content:?}: 1 character, expected at least 2"
        );
        ensure!(
            !content.contains([MARK, LITERAL, CLOSED]),
            "added token {content:?}: contains a character of U+FDD0 to U+FDD2, expected none"
        );
        let earlier = ids.insert(content.clone(), id);
        if let Some(other) = earlier.or(vocab.get(content).copied()).filter(|&other| other != id) {
            bail!("added token {content:?}: id {id}, but also id {other}");
        }
        if earlier.is_none() {
            kept.push(a);
        }
    }
    Ok(kept)
}

/// GPT-2's table from the characters of a vocabulary to bytes: printable Latin-1 stands for itself,
/// the other bytes follow in order from U+0100.
fn byte_table() -> HashMap<char, u8> {
    let mut next = 0x100u32..;
    let mut table = HashMap::with_capacity(256);
    for byte in 0..=255u8 {
        let c = match byte {
            b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff => Some(char::from(byte)),
            _ => next.next().and_then(char::from_u32),
        };
        if let Some(c) = c {
            table.insert(c, byte);
        }
    }
    table
}

fn unescape(text: &str) -> Cow<'_, str> {
    if !text.contains(MARK) {
        return Cow::Borrowed(text);
    }
    let mut out = String::with_capacity(text.len());
    let mut chars = text.chars().peekable();
    while let Some(c) = chars.next() {
        if c != MARK {
            out.push(c);
        } else if chars.next_if_eq(&LITERAL).is_some() {
            out.push(MARK);
        } else {
            let _ = chars.next_if_eq(&CLOSED);
        }
    }
    Cow::Owned(out)
}

/// Turns a stream of bytes into text, holding back a character until its last byte has come.
///
/// The pieces joined are [`String::from_utf8_lossy`] of all bytes joined.
#[derive(Clone, Debug, Default)]
pub struct Utf8Stream {
    /// Start of a character, at most three bytes.
    pending: Vec<u8>,
}

impl Utf8Stream {
    /// Adds bytes and returns the characters that are complete; invalid sequences become U+FFFD.
    pub fn push(&mut self, bytes: &[u8]) -> String {
        self.pending.extend_from_slice(bytes);
        let mut out = String::new();
        let mut rest = 0;
        let mut chunks = self.pending.utf8_chunks().peekable();
        while let Some(chunk) = chunks.next() {
            out.push_str(chunk.valid());
            let bad = chunk.invalid();
            // No error length: the bytes are right so far and only the end is missing.
            let open = || std::str::from_utf8(bad).is_err_and(|e| e.error_len().is_none());
            if chunks.peek().is_none() && open() {
                rest = bad.len();
            } else if !bad.is_empty() {
                out.push(char::REPLACEMENT_CHARACTER);
            }
        }
        self.pending.drain(..self.pending.len() - rest);
        out
    }

    /// Ends the stream: a character cut short becomes U+FFFD.
    pub fn finish(&mut self) -> String {
        let text = String::from_utf8_lossy(&self.pending).into_owned();
        self.pending.clear();
        text
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::{Value, json};

    use super::*;

    const TINY: &str = include_str!("../tests/fixtures/tiny/tokenizer.json");
    const PRESETS: [(&str, &str); 5] = [
        (TINY, include_str!("../tests/fixtures/tiny/oracle.json")),
        (
            include_str!("../tests/fixtures/odd/tokenizer.json"),
            include_str!("../tests/fixtures/odd/oracle.json"),
        ),
        (
            include_str!("../tests/fixtures/fp8/tokenizer.json"),
            include_str!("../tests/fixtures/fp8/oracle.json"),
        ),
        (
            include_str!("../tests/fixtures/groups/tokenizer.json"),
            include_str!("../tests/fixtures/groups/oracle.json"),
        ),
        (
            include_str!("../tests/fixtures/long/tokenizer.json"),
            include_str!("../tests/fixtures/long/oracle.json"),
        ),
    ];

    fn tiny() -> Tokenizer {
        Tokenizer::from_bytes(TINY.as_bytes(), "tokenizer.json").unwrap()
    }

    fn ids(value: &Value) -> Vec<u32> {
        value.as_array().unwrap().iter().map(|v| v.as_u64().unwrap() as u32).collect()
    }

    #[test]
    fn oracle_cases_agree_with_hugging_face() {
        let mut n = 0;
        for (tokenizer, oracle) in PRESETS {
            let tokenizer = Tokenizer::from_bytes(tokenizer.as_bytes(), "tokenizer.json").unwrap();
            let oracle: Value = serde_json::from_str(oracle).unwrap();
            for case in oracle["tokenizer"].as_array().unwrap() {
                let text = case["text"].as_str().unwrap();
                let expected = ids(&case["ids"]);
                assert_eq!(tokenizer.encode(text).unwrap(), expected, "{text:?}");
                assert_eq!(tokenizer.decode(&expected, false), case["decoded"], "{text:?}");
                assert_eq!(tokenizer.decode(&expected, true), case["decoded_skip_special"]);
                n += 1;
            }
            let text = &oracle["text"];
            if let Some(prompt) = text["prompt"].as_str() {
                assert_eq!(tokenizer.encode(prompt).unwrap(), ids(&text["prompt_ids"]));
                assert_eq!(tokenizer.decode(&ids(&text["greedy_ids"]), false), text["decoded"]);
            }
        }
        assert!(n >= 100, "{n} cases");
    }

    #[test]
    fn tokens_are_known_by_id_and_content() {
        let t = tiny();
        assert_eq!(t.vocab_len(), 316);
        assert_eq!(t.prefix(), Some([282, 284]));
        assert_eq!(t.control_id("<think>"), Some(301));
        assert_eq!(t.control_id("the"), None);
        assert!(t.is_special(287) && t.is_control(287));
        assert!(!t.is_special(301) && t.is_control(301));
        assert!(!t.is_control(0) && !t.is_control(316) && !t.is_control(u32::MAX));
        assert_eq!(t.token_bytes(220), b" ");
        assert_eq!(t.token_bytes(287), b"<|user|>");
        assert_eq!(t.token_bytes(316), b"");
        assert_eq!(t.token_bytes(u32::MAX), b"");
        assert_eq!(t.decode(&[64, 9999, 65], false), "ab");
    }

    #[test]
    fn user_text_never_becomes_a_control_token() {
        let t = tiny();
        for text in ["<|user|>", "/nothink", "<|user<|user|>|>", "<think>x</think>"] {
            let ids = t.encode_text(text).unwrap();
            assert!(ids.iter().all(|&id| !t.is_control(id)), "{text}");
            assert_eq!(t.decode(&ids, true), text);
            assert_eq!(t.encode(&t.escape(text, &[])).unwrap(), ids, "{text}");
        }
        assert!(matches!(t.escape("plain < text", &[]), Cow::Borrowed(_)));
        assert_eq!(t.escape("<|user|>", &[]), "<\u{fdd0}|user|>");
        assert_eq!(t.escape("\u{fdd0}", &[]), "\u{fdd0}\u{fdd1}");
        let kept = t.escape("<think>a</think><|user|>", &["<think>", "</think>"]);
        assert_eq!(kept, "<think>a</think><\u{fdd0}|user|>");
    }

    #[test]
    fn control_tokens_do_not_form_across_borders() {
        let t = tiny();
        for token in ["<|user|>", "</tool_response>", "[gMASK]", "/nothink"] {
            for (cut, _) in token.char_indices().skip(1) {
                let (a, b) = token.split_at(cut);
                let expected = t.encode_text(token).unwrap();
                let (ea, eb) = (t.escape(a, &[]), t.escape(b, &[]));
                for joined in [format!("{ea}{eb}"), format!("{ea}{b}"), format!("{a}{eb}")] {
                    assert_eq!(t.encode(&joined).unwrap(), expected, "{joined:?}");
                }
            }
        }
        // Whatever follows a closed mark is read as itself.
        let joined = format!("{}{}", t.escape("a<", &[]), t.escape("\u{fdd1}\u{fdd2}", &[]));
        assert_eq!(t.unescape(&joined), "a<\u{fdd1}\u{fdd2}");
    }

    #[test]
    fn text_avoids_control_tokens_listed_in_the_vocabulary() {
        let mut json: Value = serde_json::from_str(TINY).unwrap();
        json["model"]["vocab"]["/nothink"] = json!(311);
        let t = Tokenizer::from_bytes(json.to_string().as_bytes(), "t").unwrap();
        let ids = t.encode_text("/nothink").unwrap();
        assert_eq!(t.decode(&ids, false), "/nothink");
        assert!(ids.iter().all(|&id| !t.is_control(id)));
        assert_eq!(t.encode("/nothink").unwrap(), [311]);
    }

    fn error_after(change: impl FnOnce(&mut Value)) -> String {
        let mut json: Value = serde_json::from_str(TINY).unwrap();
        change(&mut json);
        let error = Tokenizer::from_bytes(json.to_string().as_bytes(), "t.json").unwrap_err();
        format!("{error:#}")
    }

    #[test]
    fn bad_files_are_refused_with_a_reason() {
        let start = "cannot read tokenizer t.json: ";
        let error = Tokenizer::from_bytes(b"{", "t.json").unwrap_err();
        assert!(format!("{error:#}").starts_with("cannot read tokenizer t.json: not a tokenizer"));
        type Change = Box<dyn FnOnce(&mut Value)>;
        let cases: [(&str, Change); 18] = [
            ("model: missing", Box::new(|j| j["model"] = Value::Null)),
            ("model.vocab: missing", Box::new(|j| j["model"] = json!({"type": "BPE"}))),
            ("model.vocab: 0 tokens", Box::new(|j| j["model"] = json!({"vocab": {}}))),
            ("model.type: Unigram", Box::new(|j| j["model"] = json!({"type": "Unigram"}))),
            ("decoder: WordPiece", Box::new(|j| j["decoder"]["type"] = json!("WordPiece"))),
            ("decoder: missing", Box::new(|j| j["decoder"] = Value::Null)),
            (
                "token \"the\": id 16777217",
                Box::new(|j| j["model"]["vocab"]["the"] = json!(16777217)),
            ),
            // Each of these made the library panic.
            (
                "normalizer: Precompiled, expected one of",
                Box::new(|j| {
                    j["normalizer"] =
                        json!({"type": "Precompiled", "precompiled_charsmap": "BAAAAP////8="});
                }),
            ),
            (
                "normalizer: Prepend, expected one of",
                Box::new(|j| {
                    let prepend = json!({"type": "Prepend", "prepend": ""});
                    j["normalizer"] = json!({"type": "Sequence", "normalizers": [prepend]});
                }),
            ),
            (
                "normalizer: missing, expected one of",
                Box::new(|j| j["normalizer"] = json!({"precompiled_charsmap": ""})),
            ),
            (
                "pre_tokenizer: FixedLength, expected one of",
                Box::new(|j| {
                    j["pre_tokenizer"]["pretokenizers"][0] =
                        json!({"type": "FixedLength", "length": 0});
                }),
            ),
            ("pre_tokenizer: missing", Box::new(|j| j["pre_tokenizer"] = Value::Null)),
            (
                "model.vocab: no token for byte 0x00",
                Box::new(|j| {
                    j["model"] = json!({"type": "BPE", "vocab": {"a": 0}});
                }),
            ),
            ("token \"the\": id -1", Box::new(|j| j["model"]["vocab"]["the"] = json!(-1))),
            ("id 287: held by both", Box::new(|j| j["model"]["vocab"]["zz"] = json!(287))),
            ("model.merges[0]: \"qq\"", Box::new(|j| j["model"]["merges"] = json!([["q", "q"]]))),
            (
                "added token \"<sop>\": lstrip",
                Box::new(|j| j["added_tokens"][4]["lstrip"] = json!(true)),
            ),
            (
                "added token \"x\": 1 char",
                Box::new(|j| j["added_tokens"][4]["content"] = json!("x")),
            ),
        ];
        for (expected, change) in cases {
            let error = error_after(change);
            assert!(error.starts_with(&format!("{start}{expected}")), "{error}");
        }
        assert!(
            error_after(|j| j["pre_tokenizer"] = json!({"type": "?"})).contains("pre_tokenizer")
        );
    }

    #[test]
    fn older_merges_and_missing_added_tokens_are_read() {
        let mut json: Value = serde_json::from_str(TINY).unwrap();
        for merge in json["model"]["merges"].as_array_mut().unwrap() {
            let joined = format!("{} {}", merge[0].as_str().unwrap(), merge[1].as_str().unwrap());
            *merge = json!(joined);
        }
        json.as_object_mut().unwrap().remove("added_tokens");
        let t = Tokenizer::from_bytes(json.to_string().as_bytes(), "t").unwrap();
        let text = "the cat <|user|>";
        assert_eq!(t.encode(text).unwrap(), tiny().encode_text(text).unwrap());
        assert_eq!(t.prefix(), None);
    }

    /// Text rich in control tokens, their pieces and marks.
    fn spliced() -> impl Strategy<Value = String> {
        let piece = prop_oneof![
            3 => any::<String>(),
            3 => prop::sample::select(vec![
                "<|user|>", "<think>", "</think>", "/nothink", "[gMASK]", "<|end_of_box|>",
                "<", "<|", "<|us", "er|>", "|>", ">", "think>", "\u{fdd0}", "\u{fdd1}", "\u{fdd2}",
            ]).prop_map(str::to_owned),
        ];
        prop::collection::vec(piece, 0..12).prop_map(|v| v.concat())
    }

    proptest! {
        #[test]
        fn escaped_text_encodes_as_plain_text(a in spliced(), b in spliced()) {
            let t = tiny();
            let plain = t.encode_text(&a).unwrap();
            prop_assert!(plain.iter().all(|&id| !t.is_control(id)));
            let escaped = t.escape(&a, &[]);
            prop_assert_eq!(&t.encode(&escaped).unwrap(), &plain);
            prop_assert_eq!(t.unescape(&escaped), a.clone());
            prop_assert_eq!(t.decode(&plain, false), a.clone());
            // Two escaped texts side by side are one escaped text.
            let joined = format!("{escaped}{}", t.escape(&b, &[]));
            prop_assert_eq!(t.encode(&joined).unwrap(), t.encode_text(&(a + &b)).unwrap());
        }

        #[test]
        fn kept_tokens_are_the_only_controls(text in spliced()) {
            let t = tiny();
            let ids = t.encode(&t.escape(&text, &["<think>", "</think>"])).unwrap();
            prop_assert!(ids.iter().all(|&id| !t.is_control(id) || id == 301 || id == 302));
            let thinks = ids.iter().filter(|&&id| id == 301).count();
            prop_assert_eq!(thinks, text.matches("<think>").count());
            prop_assert_eq!(t.decode(&ids, false), text);
        }

        #[test]
        fn a_cut_stream_equals_the_lossy_whole(
            bytes in prop::collection::vec(prop_oneof![
                any::<u8>(),
                prop::sample::select(b"\xe2\x82\xac\xf0\x9f\x99\x82\xed\xa0".to_vec()),
            ], 0..40),
            cuts in prop::collection::vec(0usize..40, 0..10),
        ) {
            let mut cuts: Vec<usize> = cuts.into_iter().map(|c| c.min(bytes.len())).collect();
            cuts.extend([0, bytes.len()]);
            cuts.sort_unstable();
            let mut stream = Utf8Stream::default();
            let mut out = String::new();
            for w in cuts.windows(2) {
                out += &stream.push(&bytes[w[0]..w[1]]);
                prop_assert!(stream.pending.len() < 4);
            }
            out += &stream.finish();
            prop_assert_eq!(out, String::from_utf8_lossy(&bytes));
        }
    }
}
