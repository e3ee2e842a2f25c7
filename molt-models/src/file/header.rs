//! The header of a GGUF file (version 2 and 3), read where it lies. What it counts is walked and never allocated: a claim
//! costs as much as the bytes that stand behind it.

use std::borrow::Cow;
use std::collections::BTreeMap;

use crate::texts::Texts;

/// Where tensors begin, if the header says nothing of it.
const ALIGNMENT: u64 = 32;
/// Lists in lists that are walked; no model file has any.
const DEPTH: u32 = 4;
/// Most dimensions of a tensor.
const DIMENSIONS: u32 = 4;

/// A header: everything in it is a claim of the file.
pub(super) struct Header<'a> {
    values: BTreeMap<Cow<'a, str>, Value<'a>>,
    pub(super) tensors: BTreeMap<Cow<'a, str>, TensorClaim>,
    /// Where offsets of tensors count from.
    pub(super) data: u64,
}

/// A tensor as the header describes it.
pub(super) struct TensorClaim {
    /// The fastest running last.
    pub(super) dimensions: Vec<u64>,
    /// The number of its format.
    pub(super) format: u32,
    pub(super) offset: u64,
}

#[derive(Clone)]
enum Value<'a> {
    Integer(i128),
    Float(f32),
    Text(Cow<'a, str>),
    List(List<'a>),
    Other,
}

/// A list whose values have been walked once, so that reading them again cannot fail.
#[derive(Clone)]
pub(super) struct List<'a> {
    kind: u32,
    count: u64,
    bytes: &'a [u8],
}

const TEXT: u32 = 8;
const LIST: u32 = 9;

struct Cursor<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Cursor<'a> {
    fn take(&mut self, count: u64, what: &str) -> Result<&'a [u8], String> {
        let rest = &self.bytes[self.at..];
        let taken = usize::try_from(count).ok().and_then(|count| rest.get(..count));
        let taken = taken.ok_or_else(|| format!("{what} takes {count} bytes, {} are left", rest.len()))?;
        self.at += taken.len();
        Ok(taken)
    }

    fn array<const N: usize>(&mut self, what: &str) -> Result<[u8; N], String> {
        let mut array = [0; N];
        array.copy_from_slice(self.take(N as u64, what)?);
        Ok(array)
    }

    fn u32(&mut self, what: &str) -> Result<u32, String> {
        self.array(what).map(u32::from_le_bytes)
    }

    fn u64(&mut self, what: &str) -> Result<u64, String> {
        self.array(what).map(u64::from_le_bytes)
    }

    fn text(&mut self, what: &str) -> Result<Cow<'a, str>, String> {
        let length = self.u64(what)?;
        let bytes = self.take(length, what)?;
        // Some writers end texts with a zero, and some cut them inside a character.
        let end = bytes.iter().rposition(|byte| *byte != 0).map_or(0, |last| last + 1);
        Ok(String::from_utf8_lossy(&bytes[..end]))
    }

    fn value(&mut self, kind: u32, what: &str, depth: u32) -> Result<Value<'a>, String> {
        Ok(match kind {
            0 => Value::Integer(u8::from_le_bytes(self.array(what)?).into()),
            1 => Value::Integer(i8::from_le_bytes(self.array(what)?).into()),
            2 => Value::Integer(u16::from_le_bytes(self.array(what)?).into()),
            3 => Value::Integer(i16::from_le_bytes(self.array(what)?).into()),
            4 => Value::Integer(self.u32(what)?.into()),
            5 => Value::Integer(i32::from_le_bytes(self.array(what)?).into()),
            6 => Value::Float(f32::from_le_bytes(self.array(what)?)),
            7 => self.take(1, what).map(|_| Value::Other)?,
            TEXT => Value::Text(self.text(what)?),
            LIST => Value::List(self.list(what, depth)?),
            10 => Value::Integer(self.u64(what)?.into()),
            11 => Value::Integer(i64::from_le_bytes(self.array(what)?).into()),
            12 => self.take(8, what).map(|_| Value::Other)?,
            kind => return Err(format!("{what} is of the unknown kind {kind}")),
        })
    }

    fn list(&mut self, what: &str, depth: u32) -> Result<List<'a>, String> {
        let (kind, count) = (self.u32(what)?, self.u64(what)?);
        let start = self.at;
        let each = match kind {
            0 | 1 | 7 => 1,
            2 | 3 => 2,
            4..=6 => 4,
            10..=12 => 8,
            TEXT | LIST => 0,
            kind => return Err(format!("{what} is a list of the unknown kind {kind}")),
        };
        if each > 0 {
            self.take(count.saturating_mul(each), what)?;
        } else if kind == LIST && depth == DEPTH {
            return Err(format!("{what} is lists in lists, more than {DEPTH} deep"));
        } else {
            // Every text and list takes bytes, so a count that the file does not hold ends early.
            for _ in 0..count {
                match kind {
                    TEXT => self.u64(what).and_then(|length| self.take(length, what)).map(drop)?,
                    _ => self.list(what, depth + 1).map(drop)?,
                }
            }
        }
        Ok(List { kind, count, bytes: &self.bytes[start..self.at] })
    }
}

impl<'a> List<'a> {
    fn each(&self) -> impl Iterator<Item = Value<'a>> {
        let mut cursor = Cursor { bytes: self.bytes, at: 0 };
        let kind = self.kind;
        (0..self.count).map_while(move |_| cursor.value(kind, "a value", DEPTH).ok())
    }

    /// Its texts; `None` where it holds anything else.
    pub(super) fn texts(&self) -> Option<Texts> {
        // Before each text stands its length.
        let count = usize::try_from(self.count).unwrap_or(usize::MAX).min(self.bytes.len() / size_of::<u64>());
        let mut texts = Texts::with_capacity(count, self.bytes.len() - count * size_of::<u64>());
        for value in self.each() {
            let Value::Text(text) = value else { return None };
            texts.push(&text);
        }
        Some(texts)
    }

    /// Its values; `None` for what is no whole number.
    pub(super) fn integers(&self) -> impl Iterator<Item = Option<i128>> {
        self.each().map(|value| match value {
            Value::Integer(number) => Some(number),
            _ => None,
        })
    }
}

impl<'a> Header<'a> {
    /// Reads it.
    ///
    /// # Errors
    /// What is wrong with it, with the name of the key or tensor.
    pub(super) fn read(bytes: &'a [u8]) -> Result<Self, String> {
        let mut cursor = Cursor { bytes, at: 0 };
        if cursor.take(4, "the mark")? != b"GGUF" {
            return Err("it does not begin with GGUF".to_owned());
        }
        let version = cursor.u32("the version")?;
        if !(2..=3).contains(&version) {
            return Err(format!("it is of version {version}; Molt reads 2 and 3"));
        }
        let (tensor_count, value_count) = (cursor.u64("the count of tensors")?, cursor.u64("the count of keys")?);
        let mut values = BTreeMap::new();
        for _ in 0..value_count {
            let key = cursor.text("the name of a key")?;
            let kind = cursor.u32(&key)?;
            let value = cursor.value(kind, &key, 0)?;
            if values.insert(key.clone(), value).is_some() {
                return Err(format!("it has the key {key} twice"));
            }
        }
        let mut tensors = BTreeMap::new();
        for _ in 0..tensor_count {
            let name = cursor.text("the name of a tensor")?;
            let count = cursor.u32(&name)?;
            if count > DIMENSIONS {
                return Err(format!("tensor {name} has {count} dimensions, at most {DIMENSIONS} are read"));
            }
            let mut dimensions = (0..count).map(|_| cursor.u64(&name)).collect::<Result<Vec<_>, _>>()?;
            dimensions.reverse();
            let (format, offset) = (cursor.u32(&name)?, cursor.u64(&name)?);
            if tensors.insert(name.clone(), TensorClaim { dimensions, format, offset }).is_some() {
                return Err(format!("it has the tensor {name} twice"));
            }
        }
        let alignment = match values.get("general.alignment") {
            None => ALIGNMENT,
            Some(Value::Integer(number)) if (1..=1 << 20).contains(number) => u64::try_from(*number).unwrap_or(1),
            Some(_) => return Err("its general.alignment is no count between 1 and 2^20".to_owned()),
        };
        let data = (cursor.at as u64).next_multiple_of(alignment);
        Ok(Self { values, tensors, data })
    }

    fn value(&self, key: &str) -> Result<&Value<'a>, String> {
        self.values.get(key).ok_or_else(|| format!("it has no {key}"))
    }

    pub(super) fn has(&self, key: &str) -> bool {
        self.values.contains_key(key)
    }

    pub(super) fn text(&self, key: &str) -> Result<&str, String> {
        match self.value(key)? {
            Value::Text(text) => Ok(text),
            _ => Err(format!("{key} is no text")),
        }
    }

    pub(super) fn count(&self, key: &str) -> Result<usize, String> {
        match self.value(key)? {
            Value::Integer(number) => usize::try_from(*number).map_err(|_| format!("{key} is no count")),
            _ => Err(format!("{key} is no count")),
        }
    }

    pub(super) fn float(&self, key: &str) -> Result<f32, String> {
        match self.value(key)? {
            Value::Float(number) => Ok(*number),
            _ => Err(format!("{key} is no number")),
        }
    }

    pub(super) fn list(&self, key: &str) -> Result<&List<'a>, String> {
        match self.value(key)? {
            Value::List(list) => Ok(list),
            _ => Err(format!("{key} is no list")),
        }
    }
}
