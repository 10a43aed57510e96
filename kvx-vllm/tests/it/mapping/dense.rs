//! Copies of dense tensors, in either order and with any strides, to blocks of either layout and
//! back.

use kvx_core::ErrorKind;
use kvx_testkit::test;
use kvx_vllm::mapping::{BlockRows, BlockShape, DenseShape, rows_from_block, rows_into_block};

use crate::random::Random;

/// Returns a random tensor shape: in either order, with or without gaps between heads or tokens.
fn any_shape(random: &mut Random) -> DenseShape {
    let (heads, tokens, row) = (
        1 + random.below(4) as usize,
        1 + random.below(40) as usize,
        random.one_of(&[1, 2, 4, 16]),
    );
    let gap = random.one_of(&[0, 0, 1, 7]);
    if random.below(2) == 0 {
        let token_stride = row + gap;
        let head_stride = tokens * token_stride + random.one_of(&[0, 3]);
        DenseShape { heads, tokens, row, head_stride, token_stride }
    } else {
        let head_stride = row + gap;
        let token_stride = heads * head_stride + random.one_of(&[0, 3]);
        DenseShape { heads, tokens, row, head_stride, token_stride }
    }
}

#[test]
fn every_row_lands_where_index_arithmetic_says_and_comes_back() {
    let mut random = Random(11);
    for _ in 0..2000 {
        let dense = any_shape(&mut random);
        let (heads, row) = (dense.heads, dense.row);
        let block_tokens = 1 + random.below(16) as usize;
        // K and V packed into the content, or only one of them.
        let (content, start) =
            random.one_of(&[(row, 0), (2 * row, 0), (2 * row, row), (row + 5, 3)]);
        let rows = BlockRows {
            shape: BlockShape { heads, tokens: block_tokens, content },
            heads_before_tokens: random.below(2) == 0,
            part: start..start + row,
        };
        let first = random.below(dense.tokens as u64) as usize;
        let count = (random.below(block_tokens as u64 + 1) as usize).min(dense.tokens - first);
        let tensor: Vec<u8> = (0..dense.extent().unwrap()).map(|_| random.word() as u8).collect();
        let before: Vec<u8> =
            (0..heads * block_tokens * content).map(|_| random.word() as u8).collect();

        let (mut wanted, mut wanted_back) = (before.clone(), vec![0xee; tensor.len()]);
        for head in 0..heads {
            for token in 0..count {
                let place = if rows.heads_before_tokens {
                    head * block_tokens + token
                } else {
                    token * heads + head
                };
                let from = head * dense.head_stride + (first + token) * dense.token_stride;
                let to = place * content + start;
                wanted[to..to + row].copy_from_slice(&tensor[from..from + row]);
                wanted_back[from..from + row].copy_from_slice(&tensor[from..from + row]);
            }
        }
        let mut block = before;
        rows_into_block(&tensor, &dense, first..first + count, &mut block, &rows).unwrap();
        assert_eq!(block, wanted, "{dense:?} {rows:?} {first}+{count}");
        let mut back = vec![0xee; tensor.len()];
        rows_from_block(&block, &rows, first..first + count, &mut back, &dense).unwrap();
        assert_eq!(back, wanted_back, "{dense:?} {rows:?} {first}+{count}");
    }
}

#[test]
fn rows_that_do_not_fit_are_rejected_without_changes() {
    let dense = DenseShape::heads_outermost(2, 8, 4);
    let rows = BlockRows {
        shape: BlockShape { heads: 2, tokens: 4, content: 4 },
        heads_before_tokens: true,
        part: 0..4,
    };
    let tensor = [1; 64];
    let shape = rows.shape;
    let block = |shape: BlockShape| BlockRows { shape, ..rows.clone() };
    let huge = usize::MAX;
    for (what, dense, tokens, len, rows) in [
        ("tokens beyond the tensor", dense, 7..9, 32, rows.clone()),
        ("more tokens than the block has", dense, 0..5, 32, rows.clone()),
        (
            "a tensor longer than its slice",
            DenseShape { tokens: 9, ..dense },
            0..4,
            32,
            rows.clone(),
        ),
        (
            "a stride that overflows",
            DenseShape { head_stride: huge, ..dense },
            0..4,
            32,
            rows.clone(),
        ),
        ("tokens that overflow", DenseShape { tokens: huge, ..dense }, 0..4, 32, rows.clone()),
        ("overlapping rows", DenseShape { token_stride: 0, ..dense }, 0..4, 32, rows.clone()),
        ("other heads", DenseShape { heads: 1, ..dense }, 0..4, 32, rows.clone()),
        ("other rows", DenseShape { row: 2, ..dense }, 0..4, 32, rows.clone()),
        ("a part beyond the content", dense, 0..4, 32, BlockRows { part: 1..5, ..rows.clone() }),
        ("a block of another length", dense, 0..4, 31, rows.clone()),
        ("a block that overflows", dense, 0..4, 32, block(BlockShape { tokens: huge, ..shape })),
    ] {
        let mut bytes = vec![9; len];
        let error =
            rows_into_block(&tensor, &dense, tokens.clone(), &mut bytes, &rows).unwrap_err();
        assert_eq!(
            (error.kind(), &bytes[..]),
            (ErrorKind::Invalid, &vec![9; len][..]),
            "{what}: {error}"
        );
        let mut back = [7; 64];
        let error = rows_from_block(&bytes, &rows, tokens, &mut back, &dense).unwrap_err();
        assert_eq!((error.kind(), back), (ErrorKind::Invalid, [7; 64]), "{what}: {error}");
    }
}
