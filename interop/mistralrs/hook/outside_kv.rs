//! Loads caches of keys and values from another process, and saves them for one.

use candle_core::{Result, Tensor, bail};
use std::sync::OnceLock;
use tokio::sync::mpsc::Sender;

use crate::kv_cache::{KvCache, NormalCache};
use crate::{pipeline::EitherCache, prefix_cacher::MatchingCache, response::Response, sequence::Sequence};

/// The K and V of each layer, each of shape [1, heads, tokens, head size].
pub type Layers = Vec<(Tensor, Tensor)>;

/// A source and destination of caches. The channel of a request's answers identifies the request.
pub trait OutsideKv: Send + Sync {
    /// Returns the caches of the first tokens of a prompt, never of the last one.
    fn load(&self, answers: &Sender<Response>) -> Option<Layers>;
    /// Saves the tokens of a request that has ended, and the caches of all but the last.
    fn save(&self, answers: &Sender<Response>, tokens: &[u32], layers: Layers);
}

/// The program sets this before the first request.
pub static OUTSIDE_KV: OnceLock<Box<dyn OutsideKv>> = OnceLock::new();

pub(crate) fn load(seq: &Sequence, model: &EitherCache) -> Result<Option<MatchingCache>> {
    let Some(layers) = OUTSIDE_KV.get().and_then(|outside| outside.load(&seq.responder())) else { return Ok(None) };
    let EitherCache::Normal(model) = model else { bail!("only models with plain caches are supported") };
    let (model, offset) = (model.lock().unwrap(), layers.first().map_or(0, |(k, _)| k.dims()[2]));
    if layers.len() != model.0.len() || offset == 0 || offset >= seq.get_toks().len() {
        bail!("caches of {} layers and {offset} tokens do not match the request", layers.len());
    }
    let fill = |((k, v), layer): (&(Tensor, Tensor), &KvCache)| {
        let KvCache::Normal { k: empty, .. } = layer else { bail!("only layers with plain caches are supported") };
        let room = offset.next_multiple_of(NormalCache::CACHE_GROW_SIZE);
        let mut cache = KvCache::new_normal(empty.dim, empty.max_seq_len, room);
        cache.append(k, v).map(|_| Some(cache))
    };
    let normal = layers.iter().zip(&model.0).map(fill).collect::<Result<_>>()?;
    let (toks, recurrent_snapshots) = (seq.get_toks()[offset..].to_vec(), None);
    let (images_to_keep, audios_to_keep, videos_to_keep) = (0, 0, 0);
    Ok(Some(MatchingCache::Normal {
        normal, recurrent_snapshots, images_to_keep, audios_to_keep, videos_to_keep, toks, offset,
    }))
}

pub(crate) fn save(seq: &mut Sequence) {
    let Some(outside) = OUTSIDE_KV.get() else { return };
    let both = |layer: &Option<KvCache>| Some((layer.as_ref()?.k().ok()??, layer.as_ref()?.v().ok()??));
    let layers = seq.normal_cache().iter().map(both).collect::<Option<_>>();
    layers.into_iter().for_each(|layers| outside.save(&seq.responder(), seq.get_toks(), layers));
}
