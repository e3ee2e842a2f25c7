//! What templates call, where Jinja's own would make more than they are given: held to the meter before anything is made.

use std::borrow::Cow;
use std::io;
use std::sync::Arc;

use minijinja::value::{Kwargs, Value};
use minijinja::{Environment, Error, ErrorKind, State};
use minijinja_contrib::pycompat::unknown_method_callback;
use serde::Serialize as _;
use serde_json::ser::{Formatter, PrettyFormatter};

use super::meter::{Meter, Numbers, is_namespace};
use super::program::{KEEP, PLAIN, TIMES};

/// Steps that a template may take: some thousand times what a long conversation needs.
const FUEL: u64 = 10_000_000;

/// What a rendering runs in: no files, no other templates, and nothing that is made without being measured.
pub(super) fn environment(meter: &Arc<Meter>) -> Environment<'static> {
    let mut environment = Environment::new();
    environment.set_fuel(Some(FUEL));
    // Errors would show what variables hold, and that is what people say.
    environment.set_debug(false);
    for unbounded in ["batch", "slice", "format", "pprint", "chain", "zip", "groupby"] {
        environment.remove_filter(unbounded);
    }
    for unbounded in ["dict", "debug"] {
        environment.remove_global(unbounded);
    }
    environment.add_function("range", Numbers::range);
    environment.add_function("raise_exception", |message: String| -> Result<String, Error> { Err(wrong(message)) });
    environment.add_filter(PLAIN, |value: Value| match is_namespace(&value) {
        true => Err(wrong("puts a namespace into another value")),
        false => Ok(value),
    });
    let own = meter.clone();
    environment.add_filter(KEEP, move |value: Value| own.keep(value));
    let own = meter.clone();
    environment.add_filter(TIMES, move |left: &Value, right: &Value| times(&own, left, right));
    let own = meter.clone();
    environment.add_filter("tojson", move |value: &Value, options: Kwargs| to_json(&own, value, &options));
    let own = meter.clone();
    environment.add_filter("replace", move |text: Cow<'_, str>, from: Cow<'_, str>, to: Cow<'_, str>| {
        replace(&own, &text, &from, &to, usize::MAX)
    });
    let own = meter.clone();
    environment.add_filter("join", move |items: &Value, between: Option<Cow<'_, str>>| {
        join(&own, items, &between.unwrap_or_default())
    });
    let own = meter.clone();
    environment.add_filter(
        "indent",
        move |text: Cow<'_, str>, width: Option<usize>, first: Option<bool>, blank: Option<bool>, options: Kwargs| {
            let width = width.or(options.get("width")?).unwrap_or(4);
            let first = first.or(options.get("first")?).unwrap_or(false);
            let blank = blank.or(options.get("blank")?).unwrap_or(false);
            options.assert_all_used()?;
            indent(&own, &text, width, (first, blank))
        },
    );
    let own = meter.clone();
    environment.set_unknown_method_callback(move |state, value, method, arguments| {
        method_of(&own, state, value, method, arguments)
    });
    let own = meter.clone();
    environment.set_formatter(move |out, state, value| {
        own.charge(own.weigh(value)?, "what it writes")?;
        minijinja::escape_formatter(out, state, value)
    });
    environment
}

fn wrong(what: impl Into<Cow<'static, str>>) -> Error {
    Error::new(ErrorKind::InvalidOperation, what)
}

/// Python's methods of texts and maps.
fn method_of(
    meter: &Meter,
    state: &State<'_, '_>,
    value: &Value,
    method: &str,
    given: &[Value],
) -> Result<Value, Error> {
    match (value.as_str(), method, given) {
        (Some(text), "replace", [from, to, most @ ..]) => {
            let most = most.first().and_then(Value::as_usize).unwrap_or(usize::MAX);
            replace(meter, text, &from.to_string(), &to.to_string(), most).map(Value::from)
        }
        (Some(between), "join", [items]) => join(meter, items, between).map(Value::from),
        (Some(_), "format", _) => Err(wrong("the method format is not supported")),
        _ => unknown_method_callback(state, value, method, given),
    }
}

fn times(meter: &Meter, left: &Value, right: &Value) -> Result<Value, Error> {
    let float = |value: &Value| f64::try_from(value.clone()).ok();
    if left.is_integer() && right.is_integer() {
        let (a, b) = (i64::try_from(left.clone())?, i64::try_from(right.clone())?);
        return a.checked_mul(b).map(Value::from).ok_or_else(|| wrong(format!("{a} * {b} is too large")));
    }
    if let (Some(a), Some(b)) = (float(left), float(right)) {
        return Ok(Value::from(a * b));
    }
    let (text, count) = match (left.as_str(), right.as_str()) {
        (Some(text), None) => (text, right.as_usize()),
        (None, Some(text)) => (text, left.as_usize()),
        _ => return Err(wrong(format!("cannot multiply {} by {}", left.kind(), right.kind()))),
    };
    let count = count.ok_or_else(|| wrong("texts are multiplied by whole numbers only"))?;
    if text.len().saturating_mul(count) > meter.left() {
        meter.charge(usize::MAX, "a repeated text")?;
    }
    Ok(Value::from(text.repeat(count)))
}

fn replace(meter: &Meter, text: &str, from: &str, to: &str, most: usize) -> Result<String, Error> {
    let count = text.matches(from).take(most).count();
    meter.charge(text.len().saturating_add(count.saturating_mul(to.len())), "a replacement")?;
    Ok(text.replacen(from, to, count))
}

fn join(meter: &Meter, items: &Value, between: &str) -> Result<String, Error> {
    let weight = meter.weigh(items)?;
    let mut joined = String::new();
    let mut made = 0usize;
    for (at, item) in items.try_iter()?.enumerate() {
        made = made.saturating_add(between.len());
        if made.saturating_add(weight) > meter.left() {
            meter.charge(usize::MAX, "a joined text")?;
        }
        if at > 0 {
            joined.push_str(between);
        }
        match item.as_str() {
            Some(text) => joined.push_str(text),
            None => joined.push_str(&item.to_string()),
        }
    }
    Ok(joined)
}

fn indent(meter: &Meter, text: &str, width: usize, (first, blank): (bool, bool)) -> Result<String, Error> {
    let lines = text.split('\n').count();
    meter.charge(lines.saturating_mul(width).saturating_add(text.len()), "an indented text")?;
    let space = " ".repeat(width);
    let mut indented = String::new();
    for (at, line) in text.split('\n').enumerate() {
        if at > 0 {
            indented.push('\n');
        }
        if (at > 0 || first) && (blank || !line.is_empty()) {
            indented.push_str(&space);
        }
        indented.push_str(line);
    }
    Ok(indented)
}

/// JSON as Python writes it, which is what models have read: a space after each comma and colon, nothing escaped that need
/// not be.
fn to_json(meter: &Meter, value: &Value, options: &Kwargs) -> Result<Value, Error> {
    let indent: Option<usize> = options.get("indent")?;
    // Python has more options; none of them changes what a model is told.
    let _ignored: (Option<bool>, Option<bool>) = (options.get("ensure_ascii")?, options.get("sort_keys")?);
    options.assert_all_used()?;
    meter.weigh(value)?;
    let mut written = Bounded { bytes: Vec::new(), most: meter.left() };
    let done = match indent {
        Some(indent) => {
            let indent = " ".repeat(indent.min(16));
            let style = PrettyFormatter::with_indent(indent.as_bytes());
            value.serialize(&mut serde_json::Serializer::with_formatter(&mut written, style))
        }
        None => value.serialize(&mut serde_json::Serializer::with_formatter(&mut written, Python)),
    };
    if written.most == 0 {
        meter.charge(usize::MAX, "JSON")?;
    }
    done.map_err(|e| wrong(e.to_string()))?;
    String::from_utf8(written.bytes).map(Value::from_safe_string).map_err(|e| wrong(e.to_string()))
}

/// A text that may grow by so many bytes more; at 0 it is full and takes nothing.
struct Bounded {
    bytes: Vec<u8>,
    most: usize,
}

impl io::Write for Bounded {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.most = self.most.saturating_sub(bytes.len());
        if self.most == 0 {
            return Err(io::ErrorKind::StorageFull.into());
        }
        self.bytes.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

struct Python;

impl Formatter for Python {
    fn begin_array_value<W: ?Sized + io::Write>(&mut self, writer: &mut W, first: bool) -> io::Result<()> {
        if first { Ok(()) } else { writer.write_all(b", ") }
    }

    fn begin_object_key<W: ?Sized + io::Write>(&mut self, writer: &mut W, first: bool) -> io::Result<()> {
        if first { Ok(()) } else { writer.write_all(b", ") }
    }

    fn begin_object_value<W: ?Sized + io::Write>(&mut self, writer: &mut W) -> io::Result<()> {
        writer.write_all(b": ")
    }
}
