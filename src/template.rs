#![forbid(unsafe_code)]
//! Chat messages to prompt text, by a Jinja template.
//!
//! Owns the compiled template and the environment Hugging Face templates expect: trimmed blocks,
//! loop controls, Python's string methods, `tojson`, `raise_exception` and `strftime_now`. After
//! construction the template has no syntax error. Knows nothing of tokens; text that must not turn
//! into control tokens is escaped by the caller before it comes here.
//!
//! A template comes with a model and is trusted no further than that: it cannot read files or other
//! templates; instructions, recursion and output size are bounded.

use std::io;
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::{Result, anyhow, bail, ensure};
use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, ValueKind};
use minijinja::{AutoEscape, Environment, Error, ErrorKind, Value};
use serde_json::Value as Json;

const BUILTIN: &str = include_str!("template_default.jinja");
const BUILTIN_NAME: &str = "built-in template";

const MAX_SOURCE_BYTES: usize = 1 << 20;
const MAX_OUTPUT_BYTES: usize = 64 << 20;
/// Instructions of one rendering: about a second; a long conversation needs a fraction of it.
const MAX_INSTRUCTIONS: u64 = 20_000_000;
/// Nested calls and loops; the engine's own default is 500.
const MAX_RECURSION: usize = 200;
/// Nested lists and objects in `tojson` and in messages; serde_json reads at most 128.
const MAX_DEPTH: usize = 128;

/// A compiled chat template.
pub struct Template {
    env: Environment<'static>,
    name: String,
    builtin: bool,
}

/// What a template is told besides messages and tools; `None` leaves the variable undefined.
#[derive(Clone, Debug, PartialEq)]
pub struct RenderOptions {
    /// Ends the prompt where the assistant's answer begins.
    pub add_generation_prompt: bool,
    /// Whether the model thinks before it answers.
    pub enable_thinking: Option<bool>,
    /// How long it thinks, such as `high`.
    pub reasoning_effort: Option<String>,
    /// Whether the reasoning of earlier turns is left out.
    pub clear_thinking: Option<bool>,
}

impl Default for RenderOptions {
    fn default() -> Self {
        Self {
            add_generation_prompt: true,
            enable_thinking: None,
            reasoning_effort: None,
            clear_thinking: None,
        }
    }
}

impl Template {
    /// Compiles a template; `name` is its file name in messages.
    ///
    /// # Errors
    /// Fails if the source is over 1 MiB or has a syntax error, naming its line.
    pub fn from_source(source: &str, name: &str) -> Result<Self> {
        let n = source.len();
        ensure!(n <= MAX_SOURCE_BYTES, "{name}: {n} bytes, expected at most {MAX_SOURCE_BYTES}");
        let mut env = Environment::new();
        let mut syntax = SyntaxConfig::builder();
        let syntax = syntax.trim_blocks(true).lstrip_blocks(true).build();
        env.set_syntax(syntax.map_err(|e| describe(name, &e))?);
        env.set_auto_escape_callback(|_| AutoEscape::None); // whatever the file name ends in
        env.set_recursion_limit(MAX_RECURSION);
        env.set_fuel(Some(MAX_INSTRUCTIONS));
        env.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        env.add_filter("tojson", to_json);
        env.add_function("raise_exception", raise_exception);
        env.add_function("strftime_now", strftime_now);
        env.add_template_owned(name.to_owned(), source.to_owned())
            .map_err(|e| describe(name, &e))?;
        Ok(Self { env, name: name.to_owned(), builtin: false })
    }

    /// The template of GLM-5.2, for models that bring none.
    pub fn builtin() -> Self {
        let template = Self::from_source(BUILTIN, BUILTIN_NAME).expect("compiled by the tests");
        Self { builtin: true, ..template }
    }

    /// Whether this is [`Template::builtin`].
    pub fn is_builtin(&self) -> bool {
        self.builtin
    }

    /// Renders `messages` (an array of objects) and `tools` (an array, as in the OpenAI API) to a
    /// prompt.
    ///
    /// Arguments of tool calls are objects here, not JSON in a string.
    ///
    /// # Errors
    /// Fails if the template does, naming its line, or if the prompt is over 64 MiB.
    pub fn render(
        &self,
        messages: &Json,
        tools: Option<&Json>,
        options: &RenderOptions,
    ) -> Result<String> {
        ensure!(messages.is_array(), "messages: {}, expected an array", kind_of(messages));
        if let Some(tools) = tools.filter(|t| !t.is_array() && !t.is_null()) {
            bail!("tools: {}, expected an array", kind_of(tools));
        }
        let mut context = vec![
            ("messages", from_json(messages, 0)?),
            ("tools", tools.map_or(Ok(Value::from(())), |t| from_json(t, 0))?),
            ("documents", Value::from(())),
            ("add_generation_prompt", Value::from(options.add_generation_prompt)),
        ];
        if let Some(on) = options.enable_thinking {
            context.push(("enable_thinking", Value::from(on)));
        }
        if let Some(effort) = &options.reasoning_effort {
            context.push(("reasoning_effort", Value::from(effort.as_str())));
        }
        if let Some(on) = options.clear_thinking {
            context.push(("clear_thinking", Value::from(on)));
        }
        let mut out = Bounded(Vec::new());
        self.env
            .get_template(&self.name)
            .and_then(|t| t.render_captured_to(Value::from_pairs(context), &mut out).map(drop))
            .map_err(|e| describe(&self.name, &e))?;
        String::from_utf8(out.0).map_err(|_| anyhow!("{}: output is not UTF-8", self.name))
    }
}

impl std::fmt::Debug for Template {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Template").field("name", &self.name).finish_non_exhaustive()
    }
}

/// Output that refuses to grow beyond [`MAX_OUTPUT_BYTES`].
struct Bounded(Vec<u8>);

impl io::Write for Bounded {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.0.len() + bytes.len() > MAX_OUTPUT_BYTES {
            let text = format!("output over {MAX_OUTPUT_BYTES} bytes");
            return Err(io::Error::other(text));
        }
        self.0.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// `file:line: what, why`, as one line.
fn describe(name: &str, error: &Error) -> anyhow::Error {
    let mut text = match error.detail() {
        // The template or `raise_exception` speaks for itself.
        Some(detail) if error.kind() == ErrorKind::InvalidOperation => detail.to_owned(),
        Some(detail) => format!("{}: {detail}", error.kind()),
        None => error.kind().to_string(),
    };
    let mut source = std::error::Error::source(error);
    while let Some(cause) = source {
        text = format!("{text}: {cause}");
        source = cause.source();
    }
    match error.line() {
        Some(line) => anyhow!("{name}:{line}: {text}"),
        None => anyhow!("{name}: {text}"),
    }
}

fn kind_of(value: &Json) -> &'static str {
    match value {
        Json::Null => "null",
        Json::Bool(_) => "bool",
        Json::Number(_) => "number",
        Json::String(_) => "string",
        Json::Array(_) => "array",
        Json::Object(_) => "object",
    }
}

/// Converts by hand: minijinja's `serde` feature is off.
fn from_json(value: &Json, depth: usize) -> Result<Value> {
    ensure!(depth <= MAX_DEPTH, "messages: over {MAX_DEPTH} levels deep");
    Ok(match value {
        Json::Null => Value::from(()),
        Json::Bool(b) => Value::from(*b),
        Json::Number(n) => match (n.as_i64(), n.as_u64()) {
            (Some(i), _) => Value::from(i),
            (None, Some(u)) => Value::from(u),
            (None, None) => Value::from(n.as_f64().unwrap_or(f64::NAN)),
        },
        Json::String(s) => Value::from(s.as_str()),
        Json::Array(items) => {
            let items = items.iter().map(|v| from_json(v, depth + 1));
            Value::from(items.collect::<Result<Vec<Value>>>()?)
        }
        Json::Object(map) => {
            let pairs = map.iter().map(|(k, v)| Ok((k.as_str(), from_json(v, depth + 1)?)));
            Value::from_pairs(pairs.collect::<Result<Vec<(&str, Value)>>>()?)
        }
    })
}

fn invalid(text: impl Into<String>) -> Error {
    Error::new(ErrorKind::InvalidOperation, text.into())
}

fn raise_exception(message: &str) -> Result<Value, Error> {
    Err(invalid(message))
}

/// The layout of `json.dumps`.
struct Layout {
    ensure_ascii: bool,
    indent: Option<String>,
    item: String,
    key: String,
    sort_keys: bool,
}

/// `json.dumps` with the defaults Hugging Face gives it: no ASCII escapes, Python's separators,
/// keys in order.
#[expect(clippy::needless_pass_by_value, reason = "minijinja hands arguments over by value")]
fn to_json(
    value: Value,
    ensure_ascii: Option<Value>,
    indent: Option<Value>,
    kwargs: Kwargs,
) -> Result<String, Error> {
    let arg = |positional: Option<Value>, name: &str| -> Result<Option<Value>, Error> {
        let named: Option<Value> = kwargs.get(name)?;
        Ok(named.or(positional).filter(|v| !v.is_none() && !v.is_undefined()))
    };
    let ensure_ascii = arg(ensure_ascii, "ensure_ascii")?.is_some_and(|v| v.is_true());
    let sort_keys = arg(None, "sort_keys")?.is_some_and(|v| v.is_true());
    let indent = match arg(indent, "indent")? {
        None => None,
        Some(v) => match (v.as_str(), v.as_i64()) {
            (Some(text), _) => Some(text.to_owned()),
            (None, Some(n)) if n <= 64 => Some(" ".repeat(usize::try_from(n).unwrap_or(0))),
            _ => {
                return Err(invalid(format!(
                    "tojson: indent {v}, expected at most 64 or a string"
                )));
            }
        },
    };
    let (item, key) = match arg(None, "separators")? {
        None => (if indent.is_some() { "," } else { ", " }.to_owned(), ": ".to_owned()),
        Some(pair) => {
            let text = |i| pair.get_item_by_index(i).map(|v| v.to_string());
            (text(0)?, text(1)?)
        }
    };
    kwargs.assert_all_used()?;
    let mut out = String::new();
    Layout { ensure_ascii, indent, item, key, sort_keys }.write(&mut out, &value, 0)?;
    Ok(out)
}

impl Layout {
    fn write(&self, out: &mut String, value: &Value, depth: usize) -> Result<(), Error> {
        if depth > MAX_DEPTH {
            return Err(invalid(format!("tojson: over {MAX_DEPTH} levels deep")));
        }
        if out.len() > MAX_OUTPUT_BYTES {
            return Err(invalid(format!("tojson: over {MAX_OUTPUT_BYTES} bytes")));
        }
        match value.kind() {
            ValueKind::String => self.write_str(out, value.as_str().unwrap_or_default()),
            ValueKind::None | ValueKind::Bool | ValueKind::Number => out.push_str(&scalar(value)),
            ValueKind::Seq | ValueKind::Iterable => {
                out.push('[');
                let mut any = false;
                for entry in value.try_iter()? {
                    self.start_entry(out, depth, any);
                    self.write(out, &entry, depth + 1)?;
                    any = true;
                }
                self.end(out, depth, any, ']');
            }
            ValueKind::Map => {
                let mut entries = Vec::new();
                for key in value.try_iter()? {
                    let text = match key.kind() {
                        ValueKind::String => key.as_str().unwrap_or_default().to_owned(),
                        ValueKind::None | ValueKind::Bool | ValueKind::Number => scalar(&key),
                        kind => return Err(invalid(format!("tojson: {kind} as a key"))),
                    };
                    entries.push((text, value.get_item(&key)?));
                }
                if self.sort_keys {
                    entries.sort_by(|a, b| a.0.cmp(&b.0));
                }
                out.push('{');
                for (i, (key, entry)) in entries.iter().enumerate() {
                    self.start_entry(out, depth, i > 0);
                    self.write_str(out, key);
                    out.push_str(&self.key);
                    self.write(out, entry, depth + 1)?;
                }
                self.end(out, depth, !entries.is_empty(), '}');
            }
            kind => return Err(invalid(format!("tojson: {kind} is not JSON serializable"))),
        }
        Ok(())
    }

    fn start_entry(&self, out: &mut String, depth: usize, any: bool) {
        if any {
            out.push_str(&self.item);
        }
        self.break_line(out, depth + 1);
    }

    fn end(&self, out: &mut String, depth: usize, any: bool, close: char) {
        if any {
            self.break_line(out, depth);
        }
        out.push(close);
    }

    fn break_line(&self, out: &mut String, depth: usize) {
        if let Some(indent) = &self.indent {
            out.push('\n');
            (0..depth).for_each(|_| out.push_str(indent));
        }
    }

    fn write_str(&self, out: &mut String, text: &str) {
        out.push('"');
        for c in text.chars() {
            match c {
                '"' => out.push_str("\\\""),
                '\\' => out.push_str("\\\\"),
                '\n' => out.push_str("\\n"),
                '\r' => out.push_str("\\r"),
                '\t' => out.push_str("\\t"),
                '\u{8}' => out.push_str("\\b"),
                '\u{c}' => out.push_str("\\f"),
                ' '..='~' => out.push(c),
                _ if c < ' ' || self.ensure_ascii => {
                    for unit in c.encode_utf16(&mut [0; 2]) {
                        out.push_str(&format!("\\u{unit:04x}"));
                    }
                }
                _ => out.push(c),
            }
        }
        out.push('"');
    }
}

fn scalar(value: &Value) -> String {
    match value.kind() {
        ValueKind::None => "null".to_owned(),
        ValueKind::Bool => value.is_true().to_string(),
        _ if value.is_integer() => value.to_string(),
        _ => f64::try_from(value.clone()).map_or_else(|_| value.to_string(), python_float),
    }
}

/// `repr(x)`: the shortest digits, with an exponent below 1e-4 and from 1e16 on.
fn python_float(x: f64) -> String {
    if !x.is_finite() {
        return if x.is_nan() { "NaN" } else { ["-Infinity", "Infinity"][usize::from(x > 0.0)] }
            .into();
    }
    let scientific = format!("{x:e}");
    let (digits, exponent) = scientific.split_once('e').unwrap_or((&scientific, "0"));
    match exponent.parse::<i32>() {
        Ok(e @ (..=-5 | 16..)) => {
            format!("{digits}e{}{:02}", if e < 0 { '-' } else { '+' }, e.unsigned_abs())
        }
        _ => format!("{x:?}"),
    }
}

/// The time now in UTC by the common `strftime` codes; an unknown code stays as it is.
fn strftime_now(format: &str) -> String {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs());
    strftime(format, now)
}

fn strftime(format: &str, unix: u64) -> String {
    const DAYS: [&str; 7] =
        ["Thursday", "Friday", "Saturday", "Sunday", "Monday", "Tuesday", "Wednesday"];
    const MONTHS: [&str; 12] = [
        "January",
        "February",
        "March",
        "April",
        "May",
        "June",
        "July",
        "August",
        "September",
        "October",
        "November",
        "December",
    ];
    let (days, secs) = (unix / 86_400, unix % 86_400);
    let (hour, minute, second) = (secs / 3600, secs / 60 % 60, secs % 60);
    let weekday = (days % 7) as usize; // from Thursday, 1 January 1970
    // Years of 365.2425 days from 1 March, after Hinnant, "chrono-compatible low-level date
    // algorithms".
    let z = days + 719_468;
    let (era, doe) = (z / 146_097, z % 146_097);
    let yoe = (doe - doe / 1460 + doe / 36_524 - doe / 146_096) / 365;
    let doy = doe - (365 * yoe + yoe / 4 - yoe / 100);
    let mp = (5 * doy + 2) / 153;
    let day = doy - (153 * mp + 2) / 5 + 1;
    let month = if mp < 10 { mp + 3 } else { mp - 9 };
    let year = yoe + era * 400 + u64::from(month <= 2);
    let leap = year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400));
    let yday = if month > 2 { doy + 60 + u64::from(leap) } else { doy - 305 };
    let month_name = MONTHS[(month - 1) as usize];

    let mut out = String::new();
    let mut rest = format.chars();
    while let Some(c) = rest.next() {
        if c != '%' {
            out.push(c);
            continue;
        }
        let mut code = rest.next();
        let plain = code == Some('-'); // glibc's flag against leading zeros
        if plain {
            code = rest.next();
        }
        let hour12 = (hour + 11) % 12 + 1;
        let padded = |n: u64, width: usize| {
            if plain { n.to_string() } else { format!("{n:0width$}") }
        };
        out += &match code {
            Some('Y') => year.to_string(),
            Some('y') => padded(year % 100, 2),
            Some('m') => padded(month, 2),
            Some('d') => padded(day, 2),
            Some('e') => format!("{day:2}"),
            Some('j') => padded(yday, 3),
            Some('H') => padded(hour, 2),
            Some('I') => padded(hour12, 2),
            Some('M') => padded(minute, 2),
            Some('S') => padded(second, 2),
            Some('p') => if hour < 12 { "AM" } else { "PM" }.to_owned(),
            Some('B') => month_name.to_owned(),
            Some('b' | 'h') => month_name[..3].to_owned(),
            Some('A') => DAYS[weekday].to_owned(),
            Some('a') => DAYS[weekday][..3].to_owned(),
            Some('F') => format!("{year}-{month:02}-{day:02}"),
            Some('T') => format!("{hour:02}:{minute:02}:{second:02}"),
            Some('Z') => "UTC".to_owned(),
            Some('z') => "+0000".to_owned(),
            Some('s') => unix.to_string(),
            Some('%') => "%".to_owned(),
            other => {
                let flag = if plain { "-" } else { "" };
                format!("%{flag}{}", other.map_or(String::new(), String::from))
            }
        };
    }
    out
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    const CASES: &str = include_str!("../tests/fixtures/chat_cases.json");
    const TINY: &str = include_str!("../models/tiny/chat_template.jinja");

    fn options_of(case: &Json) -> RenderOptions {
        let o = &case["options"];
        RenderOptions {
            add_generation_prompt: o["add_generation_prompt"].as_bool().unwrap(),
            enable_thinking: o["enable_thinking"].as_bool(),
            reasoning_effort: o["reasoning_effort"].as_str().map(str::to_owned),
            clear_thinking: o["clear_thinking"].as_bool(),
        }
    }

    fn no_thinking() -> RenderOptions {
        RenderOptions { enable_thinking: Some(false), ..Default::default() }
    }

    /// Renders a bare template; the only message is `x`.
    fn render(source: &str, x: &Json) -> Result<String> {
        Template::from_source(source, "t.jinja")?.render(&json!([x]), None, &no_thinking())
    }

    #[test]
    fn builtin_renders_every_case_as_transformers_does() {
        let cases: Vec<Json> = serde_json::from_str(CASES).unwrap();
        assert_eq!(cases.len(), 18);
        let template = Template::builtin();
        assert!(template.is_builtin());
        for case in &cases {
            let tools = Some(&case["tools"]).filter(|t| !t.is_null());
            let text = template.render(&case["messages"], tools, &options_of(case)).unwrap();
            assert_eq!(text, case["rendered"].as_str().unwrap(), "{}", case["name"]);
        }
    }

    #[test]
    fn tiny_template_renders() {
        let template = Template::from_source(TINY, "chat_template.jinja").unwrap();
        assert!(!template.is_builtin());
        let hi = json!([{"role": "user", "content": "Hi"}]);
        let text = template.render(&hi, None, &no_thinking()).unwrap();
        assert_eq!(text, "[gMASK]<sop><|user|>Hi<|assistant|><think></think>");
        let cases: Vec<Json> = serde_json::from_str(CASES).unwrap();
        for case in &cases {
            let tools = Some(&case["tools"]).filter(|t| !t.is_null());
            template.render(&case["messages"], tools, &options_of(case)).unwrap();
        }
    }

    #[test]
    fn builtin_names_what_it_cannot_render() {
        let error = |message: Json| {
            let e = Template::builtin().render(&json!([message]), None, &RenderOptions::default());
            e.unwrap_err().to_string()
        };
        let text = error(json!({"role": "wizard", "content": "x"}));
        assert!(text.starts_with("built-in template:"), "{text}");
        assert!(
            text.ends_with("message 0: role 'wizard', expected system, user, assistant or tool")
        );
        let text = error(json!({"role": "user", "content": [{"type": "image_url"}]}));
        assert!(text.ends_with("content part: type 'image_url', expected 'text'"), "{text}");
        let call = json!({"function": {"name": "f", "arguments": "{}"}});
        let text = error(json!({"role": "assistant", "content": null, "tool_calls": [call]}));
        assert!(text.ends_with("tool call f: arguments are not an object"), "{text}");
        let text = error(json!({"role": "user", "content": 5}));
        assert!(text.ends_with("message content: not a string or a list of text parts"), "{text}");
    }

    #[test]
    fn errors_name_file_and_line() {
        let error = |source: &str| render(source, &json!(1)).unwrap_err().to_string();
        let text = error("a\nb\n{% if %}");
        assert!(text.starts_with("t.jinja:3: syntax error: "), "{text}");
        assert_eq!(error("a\n{{ raise_exception('no') }}"), "t.jinja:2: no");
        assert!(error("{% include 'other' %}").contains("t.jinja:1:"));
        let text = Template::builtin().render(&json!("x"), None, &no_thinking()).unwrap_err();
        assert_eq!(text.to_string(), "messages: string, expected an array");
        let text = Template::builtin().render(&json!([]), Some(&json!({})), &no_thinking());
        assert_eq!(text.unwrap_err().to_string(), "tools: object, expected an array");
    }

    #[test]
    fn tojson_is_json_dumps() {
        let value = json!({
            "b": [1, 2.0, -0.5, 1e16, 1e-5, null, true],
            "a": {"é<\u{1}\u{7f}": "😀\n\"\\"},
            "e": [], "o": {}, "u": u64::MAX,
        });
        let dump =
            |args: &str| render(&format!("{{{{ messages[0] | tojson{args} }}}}"), &value).unwrap();
        let expected = [
            r#"{"b": [1, 2.0, -0.5, 1e+16, 1e-05, null, true], "a": {"é<\u0001"#,
            "\u{7f}",
            r#"": "😀\n\"\\"}, "e": [], "o": {}, "u": 18446744073709551615}"#,
        ];
        assert_eq!(dump(""), expected.concat());
        assert_eq!(dump("(ensure_ascii=False)"), dump(""));
        assert_eq!(dump("(ensure_ascii=False, indent=None)"), dump(""));
        assert!(dump("(ensure_ascii=True)").contains(r#"{"\u00e9<\u0001\u007f": "\ud83d\ude00\n"#));
        assert!(dump("(separators=(',', ':'))").starts_with("{\"b\":[1,2.0,"));
        assert!(dump("(sort_keys=True)").starts_with("{\"a\": {"));
        let pretty =
            render("{{ messages[0] | tojson(indent=2) }}", &json!({"a": [1, {}], "b": "x"}));
        assert_eq!(pretty.unwrap(), "{\n  \"a\": [\n    1,\n    {}\n  ],\n  \"b\": \"x\"\n}");
        assert_eq!(
            render("{{ [1, 'x'] | tojson(False, 1) }}", &json!(0)).unwrap(),
            "[\n 1,\n \"x\"\n]"
        );
        assert!(render("{{ nothing | tojson }}", &json!(0)).is_err());
        assert!(render("{{ 1 | tojson(bogus=1) }}", &json!(0)).is_err());
    }

    #[test]
    fn python_floats() {
        let cases = [
            (1.0, "1.0"),
            (123.456, "123.456"),
            (9.99e15, "9990000000000000.0"),
            (1e22, "1e+22"),
            (1.5e300, "1.5e+300"),
            (0.0001, "0.0001"),
            (1.25e-7, "1.25e-07"),
            (-0.0, "-0.0"),
        ];
        for (x, text) in cases {
            assert_eq!(python_float(x), text);
        }
    }

    #[test]
    fn blocks_are_trimmed_and_python_methods_exist() {
        let source = "  {% for c in 'abc' %}\n  {% if c == 'b' %}{% continue %}{% endif %}\n\
                      {{ c.upper() }}\n  {% endfor %}\nend\n";
        assert_eq!(render(source, &json!(0)).unwrap(), "A\nC\nend");
        let source = "{{ messages[0].items() | list | length }}\
                      {{ messages[0].get('k', 'd') }}{{ none }}{{ true }}";
        assert_eq!(render(source, &json!({"a": 1})).unwrap(), "1dNoneTrue");
        assert_eq!(render("{{ '<&>' }}", &json!(0)).unwrap(), "<&>");
    }

    #[test]
    fn recursion_and_output_are_bounded() {
        let source = "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}";
        assert!(render(source, &json!(0)).unwrap_err().to_string().contains("recursion limit"));
        let source = "{% set x = 'x' * 1000000 %}{% for i in range(1000) %}{{ x }}{% endfor %}";
        let error = render(source, &json!(0)).unwrap_err().to_string();
        assert!(error.contains("output over 67108864 bytes"), "{error}");
        assert!(Template::from_source(&"x".repeat(MAX_SOURCE_BYTES + 1), "t").is_err());
        let mut deep = json!(0);
        for _ in 0..200 {
            deep = json!([deep]);
        }
        assert!(render("x", &deep).is_err());
    }

    #[test]
    fn strftime_follows_glibc() {
        let all = "%Y-%m-%d %H:%M:%S %j %a %A %b %B %-d %-I %p %% %Q %";
        // date -u -d @1709210096
        let leap = "2024-02-29 12:34:56 060 Thu Thursday Feb February 29 12 PM % %Q %";
        assert_eq!(strftime(all, 1_709_210_096), leap);
        assert_eq!(strftime("%F %T %j", 0), "1970-01-01 00:00:00 001");
        assert_eq!(strftime("%F %j %a", 1_735_603_200), "2024-12-31 366 Tue");
        assert_eq!(strftime("%F %j", 1_740_787_200), "2025-03-01 060");
        assert_eq!(strftime_now("%Y").len(), 4);
    }
}
