//! Which instance serves which model: names as bits, so that a choice among hundreds looks at one word each.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};

use serde_json::Value;

/// The numbers of model names, shared by a fleet. Names beyond the 63rd share one bit.
#[derive(Debug, Default)]
pub(crate) struct ModelNames(Mutex<Vec<String>>);

impl ModelNames {
    const OTHERS: u32 = 63;

    /// The bits that an instance must have one of to serve this model; none if no instance ever named it.
    pub(crate) fn bit(&self, name: &str) -> u64 {
        let names = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let place = names.iter().position(|known| known == name);
        place.map_or(0, |place| 1 << (place as u32).min(Self::OTHERS))
    }

    fn learn(&self, name: &str) -> u64 {
        let mut names = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let place = names.iter().position(|known| known == name).unwrap_or(names.len());
        if place == names.len() && place < 4096 {
            names.push(name.to_owned());
        }
        1 << (place as u32).min(Self::OTHERS)
    }
}

/// What one instance has said that it serves.
#[derive(Debug)]
pub(crate) struct Models {
    /// All bits until it has said anything.
    bits: AtomicU64,
    cards: Mutex<Arc<BTreeMap<String, Value>>>,
}

impl Default for Models {
    fn default() -> Self {
        Models { bits: AtomicU64::new(u64::MAX), cards: Mutex::default() }
    }
}

impl Models {
    /// Whether it may serve a model of this [bit](ModelNames::bit).
    pub(crate) fn serve(&self, bit: u64) -> bool {
        let bits = self.bits.load(Relaxed);
        bits == u64::MAX || bits & bit != 0
    }

    /// The cards of `/v1/models` by their ids; empty until it has said anything.
    pub(crate) fn cards(&self) -> Arc<BTreeMap<String, Value>> {
        Arc::clone(&self.cards.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Takes an answer to `GET /v1/models`. Whatever is no list of models is as if nothing had been said.
    pub(crate) fn learn(&self, answer: &Value, names: &ModelNames) {
        let list = answer.get("data").and_then(Value::as_array).map(Vec::as_slice).unwrap_or_default();
        let id = |card: &Value| card.get("id").and_then(Value::as_str).map(str::to_owned);
        let cards: BTreeMap<String, Value> =
            list.iter().take(4096).filter_map(|card| Some((id(card)?, card.clone()))).collect();
        if cards.is_empty() {
            return;
        }
        let bits = cards.keys().fold(0, |bits, name| bits | names.learn(name));
        *self.cards.lock().unwrap_or_else(PoisonError::into_inner) = Arc::new(cards);
        self.bits.store(bits, Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_instance_serves_what_it_named_and_before_that_anything() {
        let (names, models) = (ModelNames::default(), Models::default());
        assert!(models.serve(names.bit("a")));
        models.learn(&serde_json::json!({"data": [{"id": "a"}, {"id": "b"}]}), &names);
        assert!(models.serve(names.bit("a")) && models.serve(names.bit("b")));
        assert!(!models.serve(names.bit("c")));
        models.learn(&serde_json::json!({"error": "no"}), &names);
        assert_eq!(models.cards().len(), 2, "an error says nothing");
    }

    #[test]
    fn names_beyond_the_word_share_a_bit() {
        let (names, few, many) = (ModelNames::default(), Models::default(), Models::default());
        few.learn(&serde_json::json!({"data": [{"id": "first"}]}), &names);
        let cards: Vec<_> = (0..100).map(|i| serde_json::json!({"id": format!("lora-{i}")})).collect();
        many.learn(&serde_json::json!({"data": cards}), &names);
        assert!(many.serve(names.bit("lora-99")) && !few.serve(names.bit("lora-99")));
        assert!(!many.serve(names.bit("first")));
    }
}
