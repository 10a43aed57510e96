//! Blocks with digests, which each rank writes in its own process.

use std::time::{Duration, Instant};

use kvx_connector::{LoadError, Released};
use kvx_vllm::engine::LoadFailure;
use kvx_vllm::params::TransferParams;

use super::fleet::{Fleet, extra};
use crate::runtime::rig::{BLOCK, LIMIT, builder};

pub(crate) const CASES: &[(&str, fn(&str))] = &[
    ("blocks_are_published_with_their_digests", blocks_are_published_with_their_digests),
    (
        "a_block_that_one_rank_has_spoilt_is_refused_alone",
        a_block_that_one_rank_has_spoilt_is_refused_alone,
    ),
    (
        "a_rank_that_is_killed_before_its_digests_does_not_block_publishing",
        a_rank_that_is_killed_before_its_digests_does_not_block_publishing,
    ),
];

fn digesting(engine: &str, backend: &str, tp: u32) -> Fleet {
    let extra = extra(backend).replacen('{', r#"{"kvx_digest": true, "#, 1);
    Fleet::of(builder(engine, &extra), engine, tp)
}

fn load(decode: &Fleet, request: &str, params: &TransferParams) -> Result<(), LoadError> {
    decode.fetch(request, params, &[1, 2, 3], LIMIT).join().map(drop)
}

fn blocks_are_published_with_their_digests(backend: &str) {
    for (from, to) in [(2, 2), (2, 1)] {
        let (mut prefill, mut decode) =
            (digesting("prefill", backend, from), digesting("decode", backend, to));
        // The second and the third time the blocks have other contents.
        for round in 1..=3 {
            prefill.compute(round, &[5, 6, 8], 3 * BLOCK);
            let (lease, params) =
                prefill.publish(&format!("p{round}"), &[5, 6, 8], 3 * BLOCK).unwrap();
            load(&decode, &format!("d{round}"), &params).unwrap();
            assert_eq!(decode.wrong(round, &[1, 2, 3], 0..3 * BLOCK), 0, "{from} to {to}");
            assert_eq!(lease.wait_blocking(LIMIT).unwrap(), Released::Fetched);
        }
        prefill.end();
        decode.end();
    }
}

fn a_block_that_one_rank_has_spoilt_is_refused_alone(backend: &str) {
    let (mut prefill, decode) = (digesting("prefill", backend, 2), digesting("decode", backend, 2));
    prefill.compute(7, &[5, 6, 8], 3 * BLOCK);
    let (_lease, params) = prefill.publish("p", &[5, 6, 8], 3 * BLOCK).unwrap();
    prefill.compute_on(1, 8, &[6], 1);
    let error = load(&decode, "d", &params).unwrap_err();
    assert_eq!((&error.failure, &error.invalid[..]), (&LoadFailure::Corrupt, &[2][..]), "{error}");
    prefill.end();
    decode.end();
}

fn a_rank_that_is_killed_before_its_digests_does_not_block_publishing(backend: &str) {
    let mut prefill = digesting("prefill", backend, 2);
    prefill.compute(7, &[5, 6], 2 * BLOCK);
    prefill.ranks[1].stop().unwrap_or_else(|why| panic!("{why}"));
    let (took, whole) = std::thread::scope(|threads| {
        let publishing = threads.spawn(|| {
            let began = Instant::now();
            let whole = Fleet::publish_by(&prefill.connector, "p", &[5, 6], 2 * BLOCK).is_ok();
            (began.elapsed(), whole)
        });
        std::thread::sleep(Duration::from_millis(300));
        assert!(
            !publishing.is_finished(),
            "blocks are published before all ranks have written digests"
        );
        prefill.ranks[1].kill().unwrap_or_else(|why| panic!("{why}"));
        publishing.join().unwrap()
    });
    assert!(took < Duration::from_secs(3) && whole, "{took:?}");
    let error = prefill.publish("q", &[7], BLOCK).map(drop).unwrap_err();
    assert!(error.to_string().contains("a rank of this engine is missing"), "{error}");
}
