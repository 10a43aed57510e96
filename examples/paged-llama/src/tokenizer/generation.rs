//! The defaults of requests, and the tokens that end an answer.

use serde_json::Value;

use crate::model::Config;

/// The model's defaults; `None` where it has none.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Generation {
    /// Tokens that end an answer, the ordinary one first.
    pub ends: Vec<u32>,
    /// The default temperature.
    pub temperature: Option<f32>,
    /// The default `top_p`.
    pub top_p: Option<f32>,
    /// The default `top_k`.
    pub top_k: Option<usize>,
    /// The default `min_p`.
    pub min_p: Option<f32>,
    /// The default repetition penalty.
    pub repetition_penalty: Option<f32>,
    /// The most tokens of an answer, which requests cannot raise.
    pub max_new_tokens: Option<usize>,
}

impl Generation {
    /// Returns the defaults from the model's files.
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
    fn settings_missing_from_the_file_have_no_default() {
        let said = serde_json::json!({"temperature": 0.6, "top_k": 20, "do_sample": true});
        let read = Generation::read(&said, &[2, 5]);
        assert_eq!((read.temperature, read.top_k, read.top_p), (Some(0.6), Some(20), None));
        assert_eq!(read.ends, [2, 5]);
        assert_eq!(Generation::read(&Value::Null, &[]), Generation::default());
    }
}
