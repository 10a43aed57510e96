//! Reordered blocks: exact results for elements of 1, 2 and 4 bytes, and the blocks of a live vLLM.

use kvx_core::ErrorKind;
use kvx_testkit::test;
use kvx_vllm::mapping::{BlockShape, permute_axes};

use crate::golden;
use crate::random::Random;

/// Returns a block whose elements encode their head, token and dimension, in elements of this size,
/// heads outermost.
fn block(heads: usize, tokens: usize, dim: usize, element: usize) -> Vec<u8> {
    let mut bytes = Vec::new();
    for head in 0..heads {
        for token in 0..tokens {
            for at in 0..dim {
                let number = ((head * tokens + token) * dim + at) as u32;
                bytes.extend(&number.to_le_bytes()[..element]);
            }
        }
    }
    bytes
}

#[test]
fn heads_and_tokens_change_places() {
    // Two heads, three tokens, two one-byte elements each, written out.
    let heads_first = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11];
    let tokens_first = [0, 1, 6, 7, 2, 3, 8, 9, 4, 5, 10, 11];
    let mut out = [0; 12];
    permute_axes(&heads_first, &[2, 3], &[1, 0], 2, &mut out).unwrap();
    assert_eq!(out, tokens_first);
    permute_axes(&tokens_first, &[3, 2], &[1, 0], 2, &mut out).unwrap();
    assert_eq!(out, heads_first);
}

#[test]
fn every_element_of_every_size_lands_where_it_belongs() {
    for element in [1, 2, 4] {
        for (heads, tokens, dim) in [(1, 16, 8), (2, 16, 8), (8, 4, 2), (3, 5, 7), (4, 1, 1)] {
            let heads_first = block(heads, tokens, dim, element);
            let shape = BlockShape::of_block(heads_first.len(), heads, tokens).unwrap();
            assert_eq!(shape.content, dim * element);
            let mut tokens_first = vec![0; heads_first.len()];
            let swap = [1, 0];
            permute_axes(&heads_first, &[heads, tokens], &swap, shape.content, &mut tokens_first)
                .unwrap();
            for head in 0..heads {
                for token in 0..tokens {
                    let from = (head * tokens + token) * shape.content;
                    let to = (token * heads + head) * shape.content;
                    assert_eq!(
                        heads_first[from..from + shape.content],
                        tokens_first[to..to + shape.content]
                    );
                }
            }
            let mut back = vec![0; heads_first.len()];
            permute_axes(&tokens_first, &[tokens, heads], &swap, shape.content, &mut back).unwrap();
            assert_eq!(back, heads_first);
        }
    }
}

#[test]
fn small_blocks_become_one_large() {
    for element in [1, 2, 4] {
        let (heads, tokens, dim, ratio) = (3, 8, 2, 4);
        let large = block(heads, tokens, dim, element);
        let shape = BlockShape::of_block(large.len(), heads, tokens).unwrap();
        // The producer's blocks of two tokens, one after the other.
        let mut small = Vec::new();
        for block in 0..ratio {
            for head in 0..heads {
                let first = (head * tokens + block * tokens / ratio) * shape.content;
                small.extend(&large[first..first + tokens / ratio * shape.content]);
            }
        }
        let mut merged = vec![0; large.len()];
        let small_shape = [ratio, heads, tokens / ratio];
        permute_axes(&small, &small_shape, &[1, 0, 2], shape.content, &mut merged).unwrap();
        assert_eq!(merged, large);
    }
}

#[test]
fn any_order_of_dimensions_agrees_with_index_arithmetic() {
    let mut random = Random(7);
    for _ in 0..300 {
        let dimensions = 1 + random.below(5) as usize;
        let shape: Vec<usize> = (0..dimensions).map(|_| 1 + random.below(4) as usize).collect();
        let order: Vec<usize> =
            random.distinct(dimensions, dimensions as u32).iter().map(|at| *at as usize).collect();
        let element = random.one_of(&[1, 2, 4]);
        let count: usize = shape.iter().product();
        let input: Vec<u8> = (0..count * element).map(|_| random.word() as u8).collect();
        let mut output = vec![0; input.len()];
        permute_axes(&input, &shape, &order, element, &mut output).unwrap();
        for to in 0..count {
            // Computes the output's coordinates, and from them the input's.
            let mut rest = to;
            let mut position = vec![0; dimensions];
            for at in (0..dimensions).rev() {
                let len = shape[order[at]];
                position[order[at]] = rest % len;
                rest /= len;
            }
            let from = (0..dimensions).fold(0, |from, at| from * shape[at] + position[at]);
            assert_eq!(output[to * element..][..element], input[from * element..][..element]);
        }
    }
}

#[test]
fn invalid_permutations_are_rejected() {
    let mut out = [0; 6];
    for (shape, order, element) in [
        (&[2, 3][..], &[0, 0][..], 1),
        (&[2, 3], &[0, 2], 1),
        (&[2, 3], &[0], 1),
        (&[2, 2], &[1, 0], 1),
        (&[2, 3], &[1, 0], 2),
        (&[usize::MAX, 2, 3], &[1, 0, 2], 1),
        (&[1; 9], &[0; 9], 6),
    ] {
        let error = permute_axes(&[0; 6], shape, order, element, &mut out).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Invalid);
    }
    assert!(permute_axes(&[0; 6], &[2, 3], &[1, 0], 1, &mut out[..5]).is_err());
    assert!(permute_axes(&[], &[0, 3], &[1, 0], 1, &mut []).is_ok());
    assert!(BlockShape::of_block(10, 3, 1).is_err() && BlockShape::of_block(10, 0, 1).is_err());
}

/// Reads the array of an `.npy` file, whose data start at byte 128.
fn floats(name: &str) -> Vec<f32> {
    let bytes = golden::bytes(name);
    bytes[128..].chunks_exact(4).map(|word| f32::from_le_bytes(word.try_into().unwrap())).collect()
}

#[test]
fn golden_blocks_of_vllm_hold_the_keys_and_values() {
    const HEADS: usize = 2;
    const DIM: usize = 32;
    let request = golden::json("kv_blocks/request.json");
    let number = |key: &str| request[key].as_u64().unwrap() as usize;
    let (tokens, block_len) = (number("block_size"), number("block_len"));
    let prompt = request["prompt_token_ids"].as_array().unwrap().len();
    let (keys, values) = (floats("kv_blocks/keys.npy"), floats("kv_blocks/values.npy"));
    let blocks = golden::bytes("kv_blocks/blocks.npy");
    let blocks: Vec<&[u8]> = blocks[128..].chunks_exact(block_len).collect();
    let per_layer = prompt.div_ceil(tokens);
    let half = block_len / HEADS / 2;
    for (at, block) in blocks.iter().enumerate() {
        let (layer, first) = (at / per_layer, at % per_layer * tokens);
        // Each head's K has dimensions before tokens. Reorder it like V, and join K and V of each
        // token.
        let mut rows = Vec::with_capacity(block_len);
        for head in block.chunks_exact(2 * half) {
            let mut k = vec![0; half];
            permute_axes(&head[..half], &[DIM, tokens], &[1, 0], 4, &mut k).unwrap();
            let k = k.chunks_exact(DIM * 4);
            rows.extend(
                k.zip(head[half..].chunks_exact(DIM * 4)).flat_map(|(k, v)| [k, v].concat()),
            );
        }
        // In NHD, all heads of a token are adjacent.
        let mut tokens_first = vec![0; block_len];
        let shape = BlockShape::of_block(block_len, HEADS, tokens).unwrap();
        permute_axes(&rows, &[HEADS, tokens], &[1, 0], shape.content, &mut tokens_first).unwrap();
        let word = |token: usize, head: usize, at: usize| {
            let at = ((token * HEADS + head) * 2 * DIM + at) * 4;
            f32::from_le_bytes(tokens_first[at..at + 4].try_into().unwrap())
        };
        for token in 0..tokens {
            for head in 0..HEADS {
                for dim in 0..DIM {
                    let expected = |of: &[f32]| match first + token < prompt {
                        true => of[((layer * HEADS + head) * prompt + first + token) * DIM + dim],
                        false => 0.0,
                    };
                    assert!((word(token, head, dim) - expected(&keys)).abs() < 1e-3);
                    assert!((word(token, head, DIM + dim) - expected(&values)).abs() < 1e-3);
                }
            }
        }
    }
    assert_eq!(blocks.len(), 3 * per_layer);
}
