//! Tests loads over each backend: ranks, heads, blocks, layouts, prefixes and lengths.

use kvx_testkit::{Check, Tier};
use serde_json::json;

use crate::engines::engine::Spec;
use crate::engines::fleet::{CUT_OFF, Engine, Load, MOONCAKE, ensure, pushing, spec};
use crate::engines::model::Shape;
use crate::engines::{Case, Missing, libraries};

const BACKENDS: [&str; 5] = ["SHM", "TCP", "UCX", "LIBFABRIC", "RIXL"];

/// Returns every case over every backend. Outside of the whole tier each case runs over one
/// backend, and the first over each.
pub(crate) fn cases() -> Vec<Case> {
    let all: [(&str, fn(&str) -> Check); 12] = [
        // vLLM 1, 14, 17: prompts of any length are transferred between processes, over sockets
        ("prompts_of_any_length_arrive", lengths),
        // vLLM 30, 32, 34: a load works with none, part or all of a prompt in the decode's prefix
        //     cache
        ("a_cached_prefix_is_not_loaded", prefixes),
        // vLLM 14, 17: loads from several engines run concurrently
        ("two_prefills_serve_four_decodes", fleets),
        // vLLM 7, 15, 16: heads are split and joined between TP sizes, also with fewer heads than
        //     ranks
        ("ranks_are_divided_and_joined", ranks),
        // vLLM 16: MLA: every rank loads the latent cache
        ("a_latent_is_loaded_by_every_rank", latents),
        // vLLM 22: loads work with logical blocks of 16 and 64 tokens
        ("logical_blocks_of_16_and_64_tokens_fit", blocks),
        // vLLM 26, 45: blocks are permuted and zeroed after a load
        ("heads_first_becomes_tokens_first", layouts),
        ("two_engines_prefill_for_each_other_at_once", both_ways),
        ("one_prefill_serves_decodes_over_two_backends", side_by_side),
        ("turns_of_a_conversation_go_there_and_back", conversation),
        // vLLM 8, 22: a load asks every pipeline stage, and reads from each its layers
        ("stages_of_a_pipeline_are_joined", stages),
        // vLLM 41: data-parallel ranks are engines with their own names
        ("data_parallel_ranks_are_engines_of_their_own", data_parallel),
    ];
    let mut cases = Vec::new();
    for backend in BACKENDS {
        let usual = matches!(backend, "SHM" | "TCP");
        let tier = if usual { Tier::Usual } else { Tier::Whole };
        // vLLM 47: push works between processes with any numbers of ranks, also for MLA
        cases.push(Case::new("a_prefill_writes_prompts_to_its_decodes", backend, tier, pushes));
        let (tier, run): (_, fn(&str) -> Check) = (Tier::Whole, eight_ranks);
        // vLLM 15: eight ranks load from eight ranks, by pull and by push
        cases.push(Case::new("eight_ranks_load_from_eight", backend, tier, run));
        cases.push(Case::new(
            // vLLM 8, 15: ranks in separate processes read and write over SHM, TCP, UCX, LIBFABRIC
            //     and RIXL: 2 to 1, 1 to 2, 4 to 2, more ranks than heads, latent caches, pipeline
            //     stages
            "ranks_in_processes_are_divided_and_joined",
            backend,
            tier,
            ranks_apart,
        ));
    }
    for (at, (name, run)) in all.into_iter().enumerate() {
        for backend in BACKENDS {
            let usual = at == 0 || backend == if at % 2 == 0 { "TCP" } else { "SHM" };
            let usual = if at == 8 { backend == "TCP" } else { usual };
            let case = Case::new(name, backend, if usual { Tier::Usual } else { Tier::Whole }, run);
            match (at, backend) {
                // The other backend of this case is RIXL.
                (8, "RIXL") => {}
                (8, _) => cases.push(case.needing(has_rixl)),
                _ => cases.push(case),
            }
        }
    }
    for backend in ["SHM", "UCX", "LIBFABRIC", "RIXL", "MOONCAKE"] {
        let tier = if backend == "SHM" { Tier::Usual } else { Tier::Whole };
        cases.push(Case::new(
            // vLLM 45: peers access host copies of pools on devices over SHM, and in the whole test
            //     tier over UCX, LIBFABRIC, RIXL and MOONCAKE
            "copies_of_pools_on_devices_are_what_peers_see",
            backend,
            tier,
            on_devices,
        ));
    }
    let asks: [(&str, fn(&str) -> Check); 8] = [
        // vLLM 58: the MooncakeConnector cases cover prompts of any length, partial prefix hits,
        //     2P4D, ranks, latent caches and pipeline stages, between processes over SHM, TCP and
        //     MOONCAKE
        ("prompts_of_any_length_are_written_to_who_asks", lengths),
        ("a_cached_prefix_is_not_asked_for", prefixes),
        ("two_asked_prefills_serve_four_decodes", fleets),
        // vLLM 58: the MooncakeConnector splits and joins heads for TP 2 to 1, 1 to 2 and others
        ("ranks_that_are_asked_are_divided_and_joined", ranks),
        ("a_latent_is_written_to_every_rank_that_asks", latents),
        // vLLM 63: the MooncakeConnector rejects a decode with another block size
        ("logical_blocks_of_64_tokens_are_asked_for_and_of_16_refused", equal_blocks),
        ("two_engines_ask_each_other_at_once", both_ways),
        // vLLM 58: the MooncakeConnector joins pipeline stages (PP 2 to 1)
        ("stages_that_are_asked_are_joined", stages),
    ];
    for (name, run) in asks {
        for backend in ["SHM", "TCP", "MOONCAKE"] {
            let run = move |backend: &str| run(&format!("{MOONCAKE}{backend}"));
            cases.push(Case::new(name, backend, Tier::Usual, run));
        }
    }
    cases
}

/// Starts a prefill and a decode of these shapes.
fn pair(
    backend: &str,
    prefill: Shape,
    decode: Shape,
) -> Result<(Engine, Engine), kvx_testkit::Failure> {
    let start = |name: &str, shape| Engine::start(Spec { shape, ..spec(name, backend) });
    Ok((start("prefill", prefill)?, start("decode", decode)?))
}

/// Loads prompts of these lengths one after the other, and fails unless all blocks are free
/// afterwards.
fn load_all(prefill: &mut Engine, decode: &mut Engine, lengths: &[u32]) -> Check {
    for tokens in lengths {
        let (request, prompt) = (format!("request-{tokens}"), u64::from(*tokens) << 8);
        let params = prefill.prefill(&request, prompt, *tokens)?;
        decode.loads(&Load::new(&request, prompt, *tokens), &params)?;
    }
    prefill.all_free(CUT_OFF)?;
    decode.all_free(CUT_OFF)
}

/// Starts a prefill that writes, and a decode, of these shapes.
fn pushing_pair(
    backend: &str,
    prefill: Shape,
    decode: Shape,
) -> Result<(Engine, Engine), kvx_testkit::Failure> {
    let start = |name: &str, shape| Engine::start(Spec { shape, ..pushing(name, backend) });
    Ok((start("prefill", prefill)?, start("decode", decode)?))
}

/// Writes prompts between different numbers of ranks, more ranks than heads, latents and pipeline
/// stages.
fn pushes(backend: &str) -> Check {
    for (from, to, heads) in [
        (1, 1, Some(4)),
        (2, 1, Some(4)),
        (1, 2, Some(4)),
        (4, 2, Some(4)),
        (1, 4, Some(2)),
        (4, 4, Some(2)),
        (2, 4, None),
        (4, 4, None),
    ] {
        let shape = |tp| Shape { tp, heads, ..Shape::default() };
        let (mut prefill, mut decode) = pushing_pair(backend, shape(from), shape(to))?;
        load_all(&mut prefill, &mut decode, &[1, 16, 49])?;
    }
    let stages = Shape { pp: 2, ..Shape::default() };
    let (mut prefill, mut decode) = pushing_pair(backend, stages, Shape::default())?;
    load_all(&mut prefill, &mut decode, &[1, 16, 49])
}

/// Loads between ranks in separate processes, by reads and by writes.
fn ranks_apart(backend: &str) -> Check {
    let of = |tp, heads| Shape { tp, heads, ..Shape::default() };
    let stages = Shape { pp: 2, ..Shape::default() };
    for connector in [spec, pushing] {
        let start = |id: &str, shape: &Shape| {
            Engine::start(Spec { shape: shape.clone(), apart: true, ..connector(id, backend) })
        };
        for (from, to) in [
            (of(2, Some(4)), of(1, Some(4))),
            (of(1, Some(4)), of(2, Some(4))),
            (of(4, Some(4)), of(2, Some(4))),
            (of(1, Some(2)), of(4, Some(2))),
            (of(2, None), of(4, None)),
            (stages.clone(), Shape::default()),
        ] {
            load_all(&mut start("prefill", &from)?, &mut start("decode", &to)?, &[1, 49])?;
        }
    }
    Ok(())
}

/// Loads from a device, to a device and between two, with each connector that the backend supports.
fn on_devices(backend: &str) -> Check {
    let connectors: &[fn(&str, &str) -> Spec] = match backend {
        "MOONCAKE" => &[|id, backend| spec(id, &format!("{MOONCAKE}{backend}"))],
        _ => &[spec, pushing],
    };
    for (from, to) in [(true, true), (true, false), (false, true)] {
        for connector in connectors {
            let start = |name: &str, tp, on_device| {
                let shape = Shape { tp, ..Shape::default() };
                Engine::start(Spec { shape, on_device, ..connector(name, backend) })
            };
            let (mut prefill, mut decode) = (start("prefill", 2, from)?, start("decode", 1, to)?);
            load_all(&mut prefill, &mut decode, &[1, 16, 49])?;
        }
    }
    Ok(())
}

/// Loads by reads and by writes.
fn eight_ranks(backend: &str) -> Check {
    let shape = Shape { tp: 8, heads: Some(8), ..Shape::default() };
    for pair in [pair, pushing_pair] {
        let (mut prefill, mut decode) = pair(backend, shape.clone(), shape.clone())?;
        load_all(&mut prefill, &mut decode, &[1, 49])?;
    }
    Ok(())
}

/// Reads into a decode without stages from a prefill with two, of one worker and of two workers.
fn stages(backend: &str) -> Check {
    for (from, to) in [(1, 1), (2, 1)] {
        let shape = |pp, tp| Shape { pp, tp, ..Shape::default() };
        let (mut prefill, mut decode) = pair(backend, shape(2, from), shape(1, to))?;
        load_all(&mut prefill, &mut decode, &[1, 49])?;
    }
    Ok(())
}

/// Runs two data-parallel ranks of the same name on each side; each rank's blocks are found under
/// its id.
fn data_parallel(backend: &str) -> Check {
    let start =
        |name: &str, data_parallel| Engine::start(Spec { data_parallel, ..spec(name, backend) });
    let mut prefills = [start("prefill", 0)?, start("prefill", 1)?];
    let mut decodes = [start("decode", 0)?, start("decode", 1)?];
    for (at, prefill) in prefills.iter_mut().enumerate() {
        for (to, decode) in decodes.iter_mut().enumerate() {
            let (request, prompt) = (format!("request-{at}-{to}"), (10 * at + to) as u64);
            let params = prefill.prefill(&request, prompt, 49)?;
            let id = format!("{}_dp{at}", prefill.spec.id);
            ensure(params["remote_engine_id"] == *id, || format!("{id} was wanted: {params}"))?;
            decode.loads(&Load::new(&request, prompt, 49), &params)?;
        }
    }
    // A data-parallel rank does not serve the blocks that another one has published.
    let mut stranger = start("stranger", 0)?;
    let mut params = prefills[0].prefill("lost", 7, 49)?;
    params["remote_port"] = prefills[1].port.into();
    stranger.decode(&Load::new("lost", 7, 49), &params, CUT_OFF / 2)?;
    let why = stranger.fails("lost", CUT_OFF / 2)?;
    ensure(why.contains("_dp0") && why.contains("_dp1"), || {
        format!("the error must name both ranks: {why}")
    })?;
    prefills[0].abort("lost")?;
    prefills.iter_mut().chain(&mut decodes).try_for_each(|engine| engine.all_free(CUT_OFF))
}

fn lengths(backend: &str) -> Check {
    let (mut prefill, mut decode) = pair(backend, Shape::default(), Shape::default())?;
    load_all(&mut prefill, &mut decode, &[1, 2, 15, 16, 17, 32, 48, 49])?;
    // Checks that the test detects bytes of another prompt.
    let params = prefill.prefill("one", 1, 33)?;
    decode.decode(&Load::new("one", 2, 33), &params, CUT_OFF)?;
    let found =
        decode.arrives("one", 33).err().map(|failure| failure.to_string()).unwrap_or_default();
    ensure(found.contains("wrong"), || format!("the test must detect wrong bytes: {found:?}"))
}

fn prefixes(backend: &str) -> Check {
    let (mut prefill, mut decode) = pair(backend, Shape::default(), Shape::default())?;
    for (tokens, cached) in [(48, 0), (48, 1), (49, 2), (49, 3), (48, 3), (16, 1)] {
        let (request, prompt) =
            (format!("request-{tokens}-{cached}"), u64::from(tokens * 100 + cached));
        let params = prefill.prefill(&request, prompt, tokens)?;
        decode.loads(&Load { cached, ..Load::new(&request, prompt, tokens) }, &params)?;
    }
    prefill.all_free(CUT_OFF)?;
    decode.all_free(CUT_OFF)
}

fn fleets(backend: &str) -> Check {
    let start = |name: String| Engine::start(spec(&name, backend));
    let mut prefills =
        (0..2).map(|at| start(format!("prefill-{at}"))).collect::<Result<Vec<_>, _>>()?;
    let mut decodes =
        (0..4).map(|at| start(format!("decode-{at}"))).collect::<Result<Vec<_>, _>>()?;
    // All loads are in progress concurrently.
    for (d, decode) in decodes.iter_mut().enumerate() {
        for (p, prefill) in prefills.iter_mut().enumerate() {
            let (request, prompt) = (format!("request-{p}-{d}"), (p * 10 + d) as u64);
            let params = prefill.prefill(&request, prompt, 49)?;
            decode.decode(&Load::new(&request, prompt, 49), &params, CUT_OFF)?;
        }
    }
    for (d, decode) in decodes.iter_mut().enumerate() {
        for p in 0..prefills.len() {
            decode.arrives(&format!("request-{p}-{d}"), 49)?;
        }
        decode.all_free(CUT_OFF)?;
    }
    prefills.iter_mut().try_for_each(|prefill| prefill.all_free(CUT_OFF))
}

fn ranks(backend: &str) -> Check {
    // In the last cases there are more ranks than heads, so that neighbours hold the same head.
    for (prefill, decode, heads) in
        [(2, 4, 4), (4, 2, 4), (1, 2, 2), (2, 1, 4), (1, 4, 2), (4, 4, 2)]
    {
        let shape = |tp| Shape { tp, heads: Some(heads), ..Shape::default() };
        let (mut prefill, mut decode) = pair(backend, shape(prefill), shape(decode))?;
        load_all(&mut prefill, &mut decode, &[1, 49])?;
    }
    Ok(())
}

fn latents(backend: &str) -> Check {
    for (prefill, decode) in [(1, 1), (2, 4), (4, 2), (4, 4)] {
        let shape = |tp| Shape { tp, heads: None, ..Shape::default() };
        let (mut prefill, mut decode) = pair(backend, shape(prefill), shape(decode))?;
        load_all(&mut prefill, &mut decode, &[1, 49])?;
    }
    Ok(())
}

fn blocks(backend: &str) -> Check {
    let large = Shape { kernel_per_logical: 4, blocks: 16, ..Shape::default() };
    for (prefill, decode) in [(Shape::default(), large.clone()), (large.clone(), Shape::default())]
    {
        let (mut prefill, mut decode) = pair(backend, prefill, decode)?;
        load_all(&mut prefill, &mut decode, &[1, 16, 49, 64, 65, 193])?;
    }
    Ok(())
}

/// Checks that a decode with another block size is rejected: the MooncakeConnector identifies
/// blocks by number.
fn equal_blocks(backend: &str) -> Check {
    let large = Shape { kernel_per_logical: 4, blocks: 16, ..Shape::default() };
    let (mut prefill, mut decode) = pair(backend, large.clone(), large)?;
    load_all(&mut prefill, &mut decode, &[1, 16, 49, 64, 65, 193])?;
    let mut other = Engine::start(spec("other", backend))?;
    let params = prefill.prefill("other", 7, 49)?;
    other.decode(&Load::new("other", 7, 49), &params, CUT_OFF)?;
    let why = other.fails("other", CUT_OFF)?;
    ensure(why.contains("16 tokens") && why.contains("give both the same block size"), || why)?;
    other.all_free(CUT_OFF)
}

fn layouts(backend: &str) -> Check {
    let mut prefill = Engine::start(spec("prefill", backend))?;
    let shape = Shape { heads_first: false, ..Shape::default() };
    let config = json!({ "enable_permute_local_kv": true });
    let mut decode =
        Engine::start(Spec { shape: shape.clone(), config, ..spec("decode", backend) })?;
    load_all(&mut prefill, &mut decode, &[1, 15, 16, 49])?;
    // Without `enable_permute_local_kv` different layouts are rejected, with an error that names
    // both.
    let mut stubborn = Engine::start(Spec { shape, ..spec("stubborn", backend) })?;
    let params = prefill.prefill("other", 7, 16)?;
    stubborn.decode(&Load::new("other", 7, 16), &params, CUT_OFF / 2)?;
    let why = stubborn.fails("other", CUT_OFF / 2)?;
    let named = ["LBHNC", "LBNHC", "enable_permute_local_kv"];
    ensure(named.iter().all(|name| why.contains(name)), || why)
}

fn both_ways(backend: &str) -> Check {
    let (mut one, mut other) = pair(backend, Shape::default(), Shape::default())?;
    for round in 0..4 {
        let (there, back) = (format!("there-{round}"), format!("back-{round}"));
        let (to_other, to_one) =
            (one.prefill(&there, round, 49)?, other.prefill(&back, round + 100, 33)?);
        other.decode(&Load::new(&there, round, 49), &to_other, CUT_OFF)?;
        one.decode(&Load::new(&back, round + 100, 33), &to_one, CUT_OFF)?;
        other.arrives(&there, 49)?;
        one.arrives(&back, 33)?;
    }
    one.all_free(CUT_OFF)?;
    other.all_free(CUT_OFF)
}

/// The prefill of the next turn reads what the decode has added.
fn conversation(backend: &str) -> Check {
    let start = |name: &str| {
        let mut spec = spec(name, backend);
        spec.extra["bidirectional_kv_xfer"] = true.into();
        Engine::start(spec)
    };
    let (mut prefill, mut decode) = (start("prefill")?, start("decode")?);
    let mut known = 0;
    for (turn, tokens) in [40, 88, 150].into_iter().enumerate() {
        let (there, back) = (format!("turn-{turn}"), format!("turn-{turn}-back"));
        let params = prefill.prefill(&there, 77, tokens)?;
        decode.loads(&Load { cached: known, ..Load::new(&there, 77, tokens) }, &params)?;
        let (longer, cached) = (tokens + 20, tokens / 16);
        let params = decode.prefill(&back, 77, longer)?;
        prefill.loads(&Load { cached, ..Load::new(&back, 77, longer) }, &params)?;
        known = longer / 16;
    }
    prefill.all_free(CUT_OFF)?;
    decode.all_free(CUT_OFF)
}

fn has_rixl() -> Result<(), Missing> {
    libraries::status("RIXL").map(drop).map_err(|why| (why, "see the reason"))
}

fn side_by_side(backend: &str) -> Check {
    let other = "RIXL";
    let both = vec![backend.to_owned(), other.to_owned()];
    // Without the option, RIXL would load NIXL's LIBFABRIC plugin beside LIBFABRIC, which needs a
    // CUDA driver.
    let extra = json!({ "rixl": { "plugin": "UCX" } });
    let mut prefill = Engine::start(Spec { backends: both, extra, ..spec("prefill", backend) })?;
    let mut decodes = [Engine::start(spec("one", backend))?, Engine::start(spec("two", other))?];
    for (at, decode) in decodes.iter_mut().enumerate() {
        let (request, prompt) = (format!("request-{at}"), at as u64);
        let params = prefill.prefill(&request, prompt, 49)?;
        decode.decode(&Load::new(&request, prompt, 49), &params, CUT_OFF)?;
    }
    for (at, decode) in decodes.iter_mut().enumerate() {
        decode.arrives(&format!("request-{at}"), 49)?;
        decode.all_free(CUT_OFF)?;
    }
    prefill.all_free(CUT_OFF)
}
