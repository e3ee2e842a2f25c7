//! Likelihoods of tokens in the two shapes of OpenAI's interface.

use serde_json::{Map, Value, json};

use crate::event::Likelihood;

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// As a chat tells them.
pub(super) fn of_chat(tokens: &[&Likelihood]) -> Value {
    let one = |bytes: &[u8], logprob: f64| json!({"token": text(bytes), "logprob": logprob, "bytes": bytes});
    let content = tokens.iter().map(|likelihood| {
        let mut told = one(&likelihood.token, likelihood.logprob);
        told["top_logprobs"] = likelihood.top.iter().map(|(bytes, logprob)| one(bytes, *logprob)).collect();
        told
    });
    json!({"content": content.collect::<Vec<_>>(), "refusal": null})
}

/// As a completion tells them, from so many characters into the answer.
pub(super) fn of_text(tokens: &[&Likelihood], mut offset: usize) -> Value {
    let (mut texts, mut logprobs, mut top, mut offsets) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    for likelihood in tokens {
        let token = text(&likelihood.token);
        offsets.push(offset);
        offset += token.chars().count();
        texts.push(token);
        logprobs.push(likelihood.logprob);
        // Two tokens may be the same text, as halves of characters are; the likelier one stands.
        let mut likeliest = Map::new();
        for (bytes, logprob) in &likelihood.top {
            likeliest.entry(text(bytes)).or_insert_with(|| json!(logprob));
        }
        top.push(likeliest);
    }
    json!({"tokens": texts, "token_logprobs": logprobs, "top_logprobs": top, "text_offset": offsets})
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_shapes_tell_the_same() {
        let likelihood = |token: &str, logprob, top: &[(&str, f64)]| Likelihood {
            token: token.as_bytes().to_vec(),
            logprob,
            top: top.iter().map(|(text, logprob)| (text.as_bytes().to_vec(), *logprob)).collect(),
        };
        let (first, second) = (likelihood("ü", -0.5, &[("ü", -0.5), ("a", -1.0)]), likelihood("b", -2.0, &[]));
        let chat = of_chat(&[&first, &second]);
        assert_eq!(chat["content"][0]["bytes"], json!([0xc3, 0xbc]));
        assert_eq!(chat["content"][0]["top_logprobs"][1]["token"], "a");
        assert_eq!(chat["content"][1]["logprob"], -2.0);
        let expected = json!({"tokens": ["ü", "b"], "token_logprobs": [-0.5, -2.0], "text_offset": [7, 8],
            "top_logprobs": [{"ü": -0.5, "a": -1.0}, {}]});
        assert_eq!(of_text(&[&first, &second], 7), expected);
    }
}
