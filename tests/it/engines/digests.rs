//! Tests engines whose blocks have digests (`kvx_digest`): which loads arrive, and which are
//! rejected.

use kvx_testkit::{Check, Failure, Tier};
use serde_json::json;

use crate::engines::Case;
use crate::engines::engine::{Answer, Spec};
use crate::engines::fleet::{CUT_OFF, Engine, GRACE, Load, ensure, spec};
use crate::engines::model::Shape;

/// Tokens of a prompt: three blocks of 16, and one more.
const TOKENS: u32 = 49;

pub(crate) fn cases() -> Vec<Case> {
    let all: [(&str, fn(&str) -> Check); 3] = [
        ("blocks_with_digests_arrive", arrive),
        ("a_block_that_is_spoilt_after_it_was_published_is_refused", spoilt),
        ("a_prefill_without_digests_is_refused_by_a_decode_with_them", one_sided),
    ];
    let mut cases = Vec::new();
    for (name, run) in all {
        for backend in ["TCP", "SHM"] {
            cases.push(Case::new(name, backend, Tier::Usual, run));
        }
        for backend in ["UCX", "LIBFABRIC"] {
            cases.push(Case::new(name, backend, Tier::Whole, run));
        }
    }
    cases
}

/// Starts a prefill and a decode of these shapes, with digests.
fn pair(
    backend: &str,
    prefill: Shape,
    decode: Shape,
    policy: &str,
) -> Result<(Engine, Engine), Failure> {
    let start = |name: &str, shape| {
        let extra = json!({ "kv_lease_duration": 3, "kvx_digest": true });
        let config = json!({ "kv_load_failure_policy": policy, "enable_permute_local_kv": true });
        Engine::start(Spec { shape, extra, config, ..spec(name, backend) })
    };
    Ok((start("prefill", prefill)?, start("decode", decode)?))
}

/// Loads between equal engines, from several ranks into one, between different block sizes, and
/// from heads-first into tokens-first layout.
fn arrive(backend: &str) -> Check {
    let usual = Shape::default;
    for (from, to) in [
        (usual(), usual()),
        (Shape { tp: 2, ..usual() }, usual()),
        (Shape { pp: 2, ..usual() }, usual()),
        (usual(), Shape { block_tokens: 64, blocks: 16, ..usual() }),
        (Shape { kernel_per_logical: 4, blocks: 16, ..usual() }, usual()),
        (Shape { tp: 2, heads: None, ..usual() }, Shape { tp: 4, heads: None, ..usual() }),
        (usual(), Shape { heads_first: false, ..usual() }),
    ] {
        let (mut prefill, mut decode) = pair(backend, from, to, "fail")?;
        // Later prompts reuse the same blocks with other content.
        for (prompt, tokens) in [(1, TOKENS), (2, 16), (3, TOKENS), (4, 640)] {
            let request = format!("request-{prompt}");
            let params = prefill.prefill(&request, prompt, tokens)?;
            decode.loads(&Load::new(&request, prompt, tokens), &params)?;
        }
        prefill.all_free(CUT_OFF)?;
        decode.all_free(CUT_OFF)?;
    }
    Ok(())
}

/// Checks that both policies report exactly the spoilt block, and that the next request works.
fn spoilt(backend: &str) -> Check {
    for (policy, tp) in [("fail", 1), ("recompute", 2)] {
        let shape = Shape { tp, ..Shape::default() };
        let (mut prefill, mut decode) = pair(backend, shape, Shape::default(), policy)?;
        for (prompt, spoilt) in [(1, None), (2, Some(2)), (3, Some(0)), (4, None)] {
            let request = format!("request-{prompt}");
            let params = prefill.prefill(&request, prompt, TOKENS)?;
            let load = Load::new(&request, prompt, TOKENS);
            let Some(block) = spoilt else {
                decode.loads(&load, &params)?;
                continue;
            };
            prefill.spoil(&request, block)?;
            decode.decode(&load, &params, CUT_OFF)?;
            let answer = decode.outcome(&request, CUT_OFF + GRACE)?;
            let Answer::NotLoaded { why, recompute, invalid, .. } = answer else {
                return Err(Failure::new(format!("{request} must fail, but: {answer:?}")));
            };
            let right = why.contains("digests") && recompute == (policy == "recompute");
            ensure(right && invalid == [block], || {
                format!(
                    "{request}, {policy}: {why}, computed here: {recompute}, wrong: {invalid:?}"
                )
            })?;
        }
        prefill.all_free(CUT_OFF)?;
        decode.all_free(CUT_OFF)?;
    }
    Ok(())
}

fn one_sided(backend: &str) -> Check {
    let with = Spec { extra: json!({ "kvx_digest": true }), ..spec("decode", backend) };
    let (mut prefill, mut decode) =
        (Engine::start(spec("prefill", backend))?, Engine::start(with)?);
    let params = prefill.prefill("request", 1, TOKENS)?;
    decode.decode(&Load::new("request", 1, TOKENS), &params, CUT_OFF)?;
    let why = decode.fails("request", CUT_OFF)?;
    ensure(why.contains("set kvx_digest in its kv_connector_extra_config"), || why)
}
