//! Encodes positions as rotations of queries and keys, with the scalings that `config.json` names.

use std::f64::consts::PI;

use serde_json::Value;

use super::error::{ModelError, Result};

/// The rotation per position of each pair of a head's numbers. Numbers are `f32` where transformers
/// uses them: at position 2,000 one rounding more would change the logits. Functions beyond
/// arithmetic come from libm in Rust, because the system's libm differs between hosts.
#[derive(Debug, Clone)]
pub(super) struct Rope {
    frequencies: Vec<f32>,
    /// The factor of sine and cosine.
    attention: f32,
}

impl Rope {
    /// Parses `rope_parameters`, or the older `rope_theta` and `rope_scaling`.
    pub(super) fn parse(json: &Value, head_dim: usize, max_positions: usize) -> Result<Rope> {
        let scaling = [&json["rope_parameters"], &json["rope_scaling"]]
            .into_iter()
            .find(|value| value.is_object());
        let scaling = scaling.unwrap_or(&Value::Null);
        let theta = [&scaling["rope_theta"], &json["rope_theta"]]
            .into_iter()
            .find_map(Value::as_f64)
            .unwrap_or(10_000.0);
        if !(theta > 1.0 && theta.is_finite()) {
            return Err(ModelError::new(format!(
                "rope_theta is {theta}; it must be a number above 1"
            )));
        }
        let powers: Vec<f32> = (0..head_dim / 2)
            .map(|pair| libm::pow(theta, f64::from(2.0 * pair as f32 / head_dim as f32)) as f32)
            .collect();
        let plain = powers.iter().map(|power| 1.0 / power);
        let kind = [&scaling["rope_type"], &scaling["type"]]
            .into_iter()
            .find_map(Value::as_str)
            .unwrap_or("default");
        let (frequencies, attention) = match kind {
            "default" => (plain.collect(), 1.0),
            "linear" => {
                let factor = number(scaling, "factor")? as f32;
                (plain.map(|frequency| frequency / factor).collect(), 1.0)
            }
            "llama3" => {
                let llama3 = Llama3::parse(scaling)?;
                (plain.map(|frequency| llama3.stretch(frequency)).collect(), 1.0)
            }
            "yarn" => yarn(scaling, &powers, theta, max_positions)?,
            other => {
                return Err(ModelError::new(format!(
                    "rope_type is {other:?}; use a model with default, linear, llama3 or yarn"
                )));
            }
        };
        Ok(Rope { frequencies, attention })
    }

    /// Writes the cosines of one position, one per pair, then the sines.
    pub(super) fn turn(&self, position: usize, out: &mut [f32]) {
        let (cosines, sines) = out.split_at_mut(self.frequencies.len());
        for ((frequency, cosine), sine) in self.frequencies.iter().zip(cosines).zip(sines) {
            let angle = f64::from(position as f32 * frequency);
            *cosine = libm::cos(angle) as f32 * self.attention;
            *sine = libm::sin(angle) as f32 * self.attention;
        }
    }

    /// Returns how many numbers [`Rope::turn`] writes.
    pub(super) fn width(&self) -> usize {
        2 * self.frequencies.len()
    }
}

/// Rotates a head: the first half of its numbers with the second half.
pub(super) fn rotate(head: &mut [f32], turn: &[f32]) {
    let (cosines, sines) = turn.split_at(turn.len() / 2);
    let (first, second) = head.split_at_mut(turn.len() / 2);
    for (((a, b), cosine), sine) in first.iter_mut().zip(second).zip(cosines).zip(sines) {
        (*a, *b) = (*a * cosine - *b * sine, *b * cosine + *a * sine);
    }
}

struct Llama3 {
    factor: f32,
    low: f32,
    high: f32,
    original: f32,
}

impl Llama3 {
    fn parse(scaling: &Value) -> Result<Llama3> {
        let number = |name| Ok(number(scaling, name)? as f32);
        Ok(Llama3 {
            factor: number("factor")?,
            low: number("low_freq_factor")?,
            high: number("high_freq_factor")?,
            original: number("original_max_position_embeddings")?,
        })
    }

    /// Stretches slow rotations, keeps fast ones, and interpolates between them.
    fn stretch(&self, frequency: f32) -> f32 {
        let length = 2.0 * std::f32::consts::PI / frequency;
        if length < self.original / self.high {
            frequency
        } else if length > self.original / self.low {
            frequency / self.factor
        } else {
            let smooth = (self.original / length - self.low) / (self.high - self.low);
            (1.0 - smooth) * frequency / self.factor + smooth * frequency
        }
    }
}

fn yarn(
    scaling: &Value,
    powers: &[f32],
    theta: f64,
    max_positions: usize,
) -> Result<(Vec<f32>, f32)> {
    let factor = number(scaling, "factor")?;
    let or = |name: &str, other: f64| scaling[name].as_f64().unwrap_or(other);
    let original = or("original_max_position_embeddings", max_positions as f64);
    let scale = |by: f64| if factor <= 1.0 { 1.0 } else { 0.1 * by * libm::log(factor) + 1.0 };
    let attention = match (
        scaling["attention_factor"].as_f64(),
        or("mscale", 0.0),
        or("mscale_all_dim", 0.0),
    ) {
        (Some(attention), ..) => attention,
        (None, some, all) if some != 0.0 && all != 0.0 => scale(some) / scale(all),
        _ => scale(1.0),
    };
    let dim = 2.0 * powers.len() as f64;
    // Returns the pair that makes this many turns within the model's original length.
    let pair =
        |turns: f64| dim * libm::log(original / (turns * 2.0 * PI)) / (2.0 * libm::log(theta));
    let (mut low, mut high) = (pair(or("beta_fast", 32.0)), pair(or("beta_slow", 1.0)));
    if scaling["truncate"].as_bool().unwrap_or(true) {
        (low, high) = (low.floor(), high.ceil());
    }
    (low, high) = (low.max(0.0), high.min(dim - 1.0));
    if low == high {
        high += 0.001;
    }
    let stretched = powers.iter().enumerate().map(|(pair, power)| {
        let ramp = ((pair as f32 - low as f32) / (high - low) as f32).clamp(0.0, 1.0);
        let keep = 1.0 - ramp;
        1.0 / (factor as f32 * power) * (1.0 - keep) + 1.0 / power * keep
    });
    Ok((stretched.collect(), attention as f32))
}

fn number(scaling: &Value, name: &str) -> Result<f64> {
    let value = scaling[name].as_f64().filter(|value| *value > 0.0 && value.is_finite());
    value.ok_or_else(|| {
        ModelError::new(format!(
            "{name} of the rope's scaling is {}; it must be a number",
            scaling[name]
        ))
    })
}
