//! A template as instructions, with the meter between them: after each that makes a value stands one that takes it into the
//! account. A template cannot call the meter off: the names of what is inserted are no names in Jinja.

use minijinja::Value;
use minijinja::machinery::{CodeGenerator, Instruction, Instructions, Token, WhitespaceConfig, parse, tokenize};
use minijinja::syntax::SyntaxConfig;

/// Longest template; the longest in use are some 20 KB.
const SOURCE: usize = 256 << 10;
/// Most words between two delimiters, and most branches of one choice: parsers go as deep as an expression is long.
const WORDS: usize = 1_000;
const BRANCHES: usize = 250;
/// What the compiler may compute from constants: it does so before anything is measured.
const CONSTANTS: usize = 1 << 20;

/// The filter that takes a value into the account.
pub(super) const KEEP: &str = "%keep";
/// The filter that refuses a namespace.
pub(super) const PLAIN: &str = "%plain";
/// The filter that multiplies.
pub(super) const TIMES: &str = "%times";

const SPACE: WhitespaceConfig =
    WhitespaceConfig { keep_trailing_newline: false, lstrip_blocks: true, trim_blocks: true };

/// Compiles a template.
///
/// # Errors
/// What is wrong with it.
pub(super) fn compile(source: &str) -> Result<Instructions<'_>, String> {
    check_size(source)?;
    let tree = parse(source, "chat", SyntaxConfig, SPACE).map_err(|e| format!("{e:#}"))?;
    let mut generator = CodeGenerator::new("chat", source);
    generator.compile_stmt(&tree);
    let (plain, blocks) = generator.finish();
    if !blocks.is_empty() {
        return Err("it has blocks, which are for templates of several files".to_owned());
    }
    let mut places = Vec::new();
    let mut place = 0u32;
    for at in 0.. {
        let Some(instruction) = plain.get(at) else { break };
        places.push(place);
        place += u32::try_from(metered(instruction, &|at| at)?.len()).unwrap_or(u32::MAX);
    }
    // A jump may go to the end.
    places.push(place);
    let moved = |at: u32| usize::try_from(at).ok().and_then(|at| places.get(at)).copied().unwrap_or(place);
    let mut program = Instructions::new("chat", source);
    for at in 0.. {
        let Some(instruction) = plain.get(at) else { break };
        let line = plain.get_line(at).and_then(|line| u16::try_from(line).ok()).unwrap_or(0);
        for instruction in metered(instruction, &moved)? {
            program.add_with_line(instruction, line);
        }
    }
    Ok(program)
}

/// What stands for an instruction of the plain program.
fn metered<'a>(plain: &Instruction<'a>, moved: &dyn Fn(u32) -> u32) -> Result<Vec<Instruction<'a>>, String> {
    use Instruction as I;
    let filter = |name, arguments| I::ApplyFilter(name, Some(arguments), !0);
    Ok(match plain {
        // What is written is measured where values are.
        I::EmitRaw(text) => vec![I::LoadConst(Value::from_safe_string((*text).to_owned())), I::Emit],
        I::Add
        | I::StringConcat
        | I::Slice
        | I::ApplyFilter(..)
        | I::CallFunction(..)
        | I::CallMethod(..)
        | I::CallObject(..)
        | I::EndCapture
        | I::BuildMap(_)
        | I::BuildList(_) => vec![plain.clone(), filter(KEEP, 1)],
        // A repeated list is computed as it is read, and may have been made of constants by the compiler.
        I::LoadConst(value) if value.as_object().is_some() => vec![plain.clone(), filter(KEEP, 1)],
        I::Mul => vec![filter(TIMES, 2), filter(KEEP, 1)],
        I::SetAttr(_) => vec![I::Swap, filter(PLAIN, 1), I::Swap, plain.clone()],
        I::Iterate(to) => vec![I::Iterate(moved(*to))],
        I::Jump(to) => vec![I::Jump(moved(*to))],
        I::JumpIfFalse(to) => vec![I::JumpIfFalse(moved(*to))],
        I::JumpIfFalseOrPop(to) => vec![I::JumpIfFalseOrPop(moved(*to))],
        I::JumpIfTrueOrPop(to) => vec![I::JumpIfTrueOrPop(moved(*to))],
        I::BuildMacro(name, at, flags) => vec![I::BuildMacro(name, moved(*at), *flags)],
        I::UnpackLists(_) | I::MergeKwargs(_) => return Err("it calls something with * or **".to_owned()),
        I::FastSuper | I::CallBlock(_) | I::LoadBlocks | I::Include(_) | I::ExportLocals => {
            return Err("it wants other templates, and there are none".to_owned());
        }
        // Every other instruction moves values, compares them or computes with numbers.
        other => vec![other.clone()],
    })
}

/// Refuses what parsers would go too deep into. They recurse over nested expressions, which they bound, and over long
/// ones, which they do not.
fn check_size(source: &str) -> Result<(), String> {
    if source.len() > SOURCE {
        return Err(format!("it has {} bytes, at most {SOURCE} are read", source.len()));
    }
    let (mut words, mut branches, mut opening) = (0, 0, false);
    let (mut product, mut constants) = (Product::default(), 0usize);
    for token in tokenize(source, false, SyntaxConfig, SPACE) {
        let (token, span) = token.map_err(|e| format!("{e:#}"))?;
        match token {
            Token::BlockStart | Token::VariableStart => {
                words = 0;
                product = Product::default();
            }
            Token::BlockEnd | Token::VariableEnd => constants = constants.saturating_add(product.bound()),
            Token::Ident("elif") if opening => branches += 1,
            _ => words += 1,
        }
        product.see(&token);
        opening = matches!(token, Token::BlockStart);
        let line = span.start_line;
        if words > WORDS || branches > BRANCHES {
            return Err(format!("it has more than {WORDS} words in one place, or {BRANCHES} branches, at line {line}"));
        }
        if constants > CONSTANTS {
            return Err(format!("it multiplies constants to more than {CONSTANTS} bytes, at line {line}"));
        }
    }
    Ok(())
}

/// How large a product of what stands between two delimiters can be at most: adding and multiplying numbers, each used once,
/// gives no more than the product of all of them, each greater by one.
#[derive(Default)]
struct Product {
    multiplies: bool,
    repeatable: bool,
    endless: bool,
    bytes: usize,
    factor: usize,
}

impl Product {
    fn see(&mut self, token: &Token<'_>) {
        self.bytes += 1;
        match token {
            Token::Mul => self.multiplies = true,
            Token::Pow | Token::Div | Token::Float(_) | Token::Int128(_) => self.endless = true,
            Token::BracketOpen => self.repeatable = true,
            Token::Str(text) => (self.repeatable, self.bytes) = (true, self.bytes + text.len()),
            Token::String(text) => (self.repeatable, self.bytes) = (true, self.bytes + text.len()),
            Token::Int(number) => {
                let number = usize::try_from(*number).unwrap_or(usize::MAX);
                self.factor = self.factor.max(1).saturating_mul(number.saturating_add(1));
            }
            _ => {}
        }
    }

    fn bound(&self) -> usize {
        match (self.multiplies && self.repeatable, self.endless) {
            (false, _) => 0,
            (true, true) => usize::MAX,
            (true, false) => self.bytes.saturating_mul(self.factor.max(1)),
        }
    }
}
