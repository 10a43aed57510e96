//! What requests get that do not say otherwise, and which tokens end an answer.

use serde_json::Value;

use crate::model::Config;

/// The model's own defaults. `None`: it does not say.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Generation {
    /// Tokens that end an answer, the ordinary one first.
    pub ends: Vec<u32>,
    /// As in a request.
    pub temperature: Option<f32>,
    /// As in a request.
    pub top_p: Option<f32>,
    /// As in a request.
    pub top_k: Option<usize>,
    /// As in a request.
    pub min_p: Option<f32>,
    /// As in a request.
    pub repetition_penalty: Option<f32>,
    /// The longest answer, whatever a request says.
    pub max_new_tokens: Option<usize>,
}

impl Generation {
    /// What a model's files say.
    pub fn of(config: &Config) -> Self {
        Self::read(&config.generation, &config.eos)
    }

    fn read(generation: &Value, ends: &[u32]) -> Self {
        let number = |key: &str| generation[key].as_f64().map(|number| number as f32);
        let count = |key: &str| generation[key].as_u64().map(|number| number as usize);
        Generation {
            ends: ends.to_vec(),
            temperature: number("temperature"),
            top_p: number("top_p"),
            top_k: count("top_k"),
            min_p: number("min_p"),
            repetition_penalty: number("repetition_penalty"),
            max_new_tokens: count("max_new_tokens"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_file_does_not_say_is_not_said() {
        let said = serde_json::json!({"temperature": 0.6, "top_k": 20, "do_sample": true});
        let read = Generation::read(&said, &[2, 5]);
        assert_eq!((read.temperature, read.top_k, read.top_p), (Some(0.6), Some(20), None));
        assert_eq!(read.ends, [2, 5]);
        assert_eq!(Generation::read(&Value::Null, &[]), Generation::default());
    }
}
