//! Chat templates: the Jinja text inside a model file turns messages into a prompt.
//!
//! A template comes from whoever made the file. It runs with a bounded number of steps and without access to files; the
//! memory that its steps take is not bounded.

use minijinja::{Environment, context};
use serde::{Deserialize, Serialize};

use crate::error::ModelError;

/// Steps that a template may take: some thousand times what a long conversation needs.
const FUEL: u64 = 5_000_000;

/// One message of a conversation.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Message {
    /// `system`, `user` or `assistant`.
    pub role: String,
    /// What was said.
    pub content: String,
}

impl Message {
    /// A message of that role.
    pub fn new(role: &str, content: &str) -> Self {
        Self { role: role.to_owned(), content: content.to_owned() }
    }
}

/// A chat template, parsed.
#[derive(Debug)]
pub struct ChatTemplate {
    environment: Environment<'static>,
    bos: String,
}

impl ChatTemplate {
    /// Parses a template.
    pub fn new(source: &str, bos: Option<&str>) -> Result<Self, ModelError> {
        let mut environment = Environment::new();
        environment.set_fuel(Some(FUEL));
        environment.set_trim_blocks(true);
        environment.set_lstrip_blocks(true);
        environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        environment.add_function("raise_exception", |message: String| -> Result<String, minijinja::Error> {
            Err(minijinja::Error::new(minijinja::ErrorKind::InvalidOperation, message))
        });
        environment
            .add_template_owned("chat", source.to_owned())
            .map_err(|e| ModelError::Template(format!("{e:#}")))?;
        Ok(Self { environment, bos: bos.unwrap_or_default().to_owned() })
    }

    /// The prompt for these messages, open for the assistant's answer.
    pub fn render(&self, messages: &[Message]) -> Result<String, ModelError> {
        let error = |e: minijinja::Error| ModelError::Template(format!("{e:#}"));
        let template = self.environment.get_template("chat").map_err(error)?;
        template.render(context! { messages, add_generation_prompt => true, bos_token => self.bos }).map_err(error)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_become_a_prompt() {
        let source = "{{ bos_token }}{% for m in messages %}[{{ m['role'].upper() }}]{{ m.content }}{% endfor %}\
                      {% if add_generation_prompt %}[A]{% endif %}";
        let template = ChatTemplate::new(source, Some("<s>")).unwrap();
        let prompt = template.render(&[Message::new("system", "Be brief."), Message::new("user", "Hi")]).unwrap();
        assert_eq!(prompt, "<s>[SYSTEM]Be brief.[USER]Hi[A]");
    }

    #[test]
    fn a_bad_template_is_refused_and_an_endless_one_ends() {
        let reason = ChatTemplate::new("{% for %}", None).unwrap_err().to_string();
        assert!(reason.contains("chat"), "{reason}");
        let endless = "{% for a in range(9999) %}{% for b in range(9999) %}x{% endfor %}{% endfor %}";
        let reason = ChatTemplate::new(endless, None).unwrap().render(&[]).unwrap_err().to_string();
        assert!(reason.contains("fuel"), "{reason}");
        let refusing = "{{ raise_exception('roles must alternate') }}";
        let reason = ChatTemplate::new(refusing, None).unwrap().render(&[]).unwrap_err().to_string();
        assert!(reason.contains("roles must alternate"), "{reason}");
    }
}
