//! All uses of kvx in this server: a pool of blocks next to mistral.rs's dense caches, a connector,
//! and the running requests.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use candle_core::{DType, Device, Tensor};
use kvx::config::KvTransferConfig;
use kvx::connector::{Then, WorkerRank, DenseShape, KvLayout, TransferParams, Connector, Decode, DenseModel, DensePool, DenseView, DenseViewMut, Prefill, CompatibilityFactors};
use mistralrs_core::{Layers, OutsideKv, Response};
use serde_json::Value;
use tokio::sync::mpsc::{Sender, WeakSender};
use tokio::sync::oneshot;

/// Tokens per block; the default of vLLM.
const BLOCK: u32 = 16;
/// The time that a request waits for its blocks.
const PATIENCE: Duration = Duration::from_secs(60);

/// A request that has ended in mistral.rs.
pub struct Ended {
    /// The tokens of the prompt and of the answer.
    pub tokens: Vec<u32>,
    /// The caches of all tokens but the last.
    caches: Layers,
    /// The number of prompt tokens whose caches were loaded.
    pub loaded: usize,
}

struct UnderWay {
    /// A weak sender does not keep the channel open, as the engine may end without an answer.
    answers: WeakSender<Response>,
    caches: Option<Layers>,
    loaded: usize,
    ended: oneshot::Sender<Ended>,
}

/// The requests that mistral.rs runs, for its hook.
#[derive(Clone, Default)]
pub struct Requests(Arc<Mutex<Vec<UnderWay>>>);

impl Requests {
    /// Adds a request before it is sent to mistral.rs, with the caches that were loaded for it. The
    /// entry is removed when the returned receiver is dropped.
    pub fn begin(&self, answers: &Sender<Response>, caches: Option<Layers>) -> oneshot::Receiver<Ended> {
        let (ended, hears) = oneshot::channel();
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        all.retain(|request| !request.ended.is_closed());
        all.push(UnderWay { answers: answers.downgrade(), caches, loaded: 0, ended });
        hears
    }
}

impl UnderWay {
    fn is_of(&self, answers: &Sender<Response>) -> bool {
        self.answers.upgrade().is_some_and(|ours| ours.same_channel(answers))
    }
}

impl OutsideKv for Requests {
    fn load(&self, answers: &Sender<Response>) -> Option<Layers> {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let request = all.iter_mut().find(|request| request.is_of(answers))?;
        let caches = request.caches.take()?;
        request.loaded = caches.first()?.0.dims()[2];
        Some(caches)
    }

    fn save(&self, answers: &Sender<Response>, tokens: &[u32], caches: Layers) {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(at) = all.iter().position(|request| request.is_of(answers)) {
            let UnderWay { loaded, ended, .. } = all.swap_remove(at);
            // An error means that the receiver was dropped.
            let _ = ended.send(Ended { tokens: tokens.to_vec(), caches, loaded });
        }
    }
}

/// The connection to other engines.
pub struct Kv {
    connector: Connector,
    pool: DensePool,
    /// The size of a token's cache: layers, heads, numbers per head.
    shape: [usize; 3],
}

impl Kv {
    /// Listens for peers with this model, if the configuration requests it. The pool has `blocks`
    /// blocks.
    pub async fn open(config: &KvTransferConfig, model: &str, blocks: u32) -> Result<Option<Self>> {
        if !config.is_kv_transfer_instance() {
            return Ok(None);
        }
        let told: Value = serde_json::from_slice(&std::fs::read(format!("{model}/config.json"))?)?;
        let number = |name: &str| told[name].as_u64().map(|number| number as usize).context(name.to_owned());
        let (layers, all_heads) = (number("num_hidden_layers")?, number("num_attention_heads")?);
        let heads = number("num_key_value_heads").unwrap_or(all_heads);
        let size = number("head_dim").or_else(|_| number("hidden_size").map(|hidden| hidden / all_heads))?;
        let mut factors = CompatibilityFactors::from_config(config, model);
        factors.dtype = "torch.float32".into();
        (factors.num_kv_heads, factors.head_size) = (heads as u32, size as u32);
        factors.num_hidden_layers = layers as u32;
        let model = DenseModel {
            layers: (0..layers).map(|at| format!("model.layers.{at}.self_attn.attn").into()).collect(),
            heads: heads as u32,
            rank_heads: heads,
            row: size * size_of::<f32>(),
            block_tokens: BLOCK,
            layout: KvLayout::Lbhnc,
        };
        let pool = DensePool::new(model, blocks)?;
        let builder = Connector::builder(config, kvx::registry(), factors).block_size(BLOCK);
        let connector = builder.build().await?;
        let rank = connector.rank(WorkerRank { pp: 0, tp: 0 })?;
        rank.register(pool.caches()?, [pool.memory().clone()])?;
        Ok(Some(Kv { connector, pool, shape: [layers, heads, size] }))
    }

    /// Loads the caches of a prompt's tokens except the last one from a peer. Returns `None` if the
    /// prompt must be computed locally, and an error if `kv_load_failure_policy` fails the request.
    pub async fn load(&self, request: &str, params: &Value, prompt: usize) -> Result<Option<Layers>> {
        let params = TransferParams::from_value(params)?;
        if !params.do_remote_prefill {
            return Ok(None);
        }
        let tokens = params.remote_num_tokens.map_or(prompt, |theirs| theirs as usize);
        ensure!(tokens <= prompt, "the blocks have {tokens} tokens, but the prompt has only {prompt}");
        let [layers, heads, size] = self.shape;
        let shape = DenseShape::heads_outermost(heads, tokens, size * size_of::<f32>());
        let mut layers = vec![[(); 2].map(|()| vec![0; heads * tokens * size * size_of::<f32>()]); layers];
        let views =
            layers.iter_mut().map(|layer| layer.each_mut().map(|bytes| DenseViewMut { bytes, shape }));
        let mut views: Vec<_> = views.collect();
        let decode = Decode::new(&self.connector);
        let loaded = match decode.load(request, &params, &self.pool, tokens, &mut views, PATIENCE).await {
            Ok(loaded) => (loaded.tokens.end as usize).min(prompt - 1),
            Err(error) if matches!(error.then, Then::Recompute { .. }) => {
                tracing::warn!(request, "computing the prompt locally: {error}");
                0
            }
            Err(error) => bail!("cannot load the caches from the prefill: {error}"),
        };
        let tensor = |bytes: &Vec<u8>| {
            let whole = Tensor::from_raw_buffer(bytes, DType::F32, &[1, heads, tokens, size], &Device::Cpu)?;
            whole.narrow(2, 0, loaded)
        };
        let tensors = layers.iter().map(|[k, v]| Ok((tensor(k)?, tensor(v)?)));
        (loaded > 0).then(|| tensors.collect()).transpose()
    }

    /// Publishes the caches of a prompt with `prompt` tokens. Returns the parameters for a decode.
    pub fn publish(&self, request: &str, prompt: usize, ended: &Ended) -> Result<Value> {
        let numbers = |tensor: &Tensor| -> candle_core::Result<Vec<f32>> {
            tensor.narrow(2, 0, prompt)?.flatten_all()?.to_vec1() // fails unless the caches are f32
        };
        let layers = ended.caches.iter().map(|(k, v)| Ok([numbers(k)?, numbers(v)?]));
        let layers: Vec<_> = layers.collect::<Result<_>>()?;
        let shape = DenseShape::heads_outermost(self.shape[1], prompt, self.shape[2] * size_of::<f32>());
        let both = layers.iter().map(|layer| layer.each_ref().map(|numbers| bytemuck::cast_slice(numbers)));
        let views: Vec<_> = both.map(|both| both.map(|bytes| DenseView { bytes, shape })).collect();
        let (lease, params) = Prefill::new(&self.connector).save(request, &self.pool, prompt, &views)?;
        tokio::spawn(lease.released());
        Ok(serde_json::to_value(params)?)
    }

    /// Shuts the connector down.
    pub async fn end(&self) -> Result<()> {
        Ok(self.connector.shutdown(Duration::from_secs(5)).await?)
    }
}
