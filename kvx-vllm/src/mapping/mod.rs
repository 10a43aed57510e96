//! The mapping of bytes between ranks: regions, ranks, heads, block lists and layouts.
//!
//! This module has only plain functions and small immutable values, without I/O. They are used in
//! this order:
//!
//! 1. [`Caches::of_layers`] turns the KV caches of this rank into a [`Geometry`], and
//!    [`Caches::advertise`] writes it into the metadata of the handshake.
//! 2. The handshake with each rank in [`handshake_ranks`] yields a [`Geometry::advertised`], which
//!    checks every number from the peer.
//! 3. [`PeerMap::new`] pairs both sides once per peer. For each rank of the peer, it creates
//!    [`Lane`]s (a local and a remote grid of equal block length) and [`LaneSet`]s (the lanes that
//!    share an index list).
//! 4. [`PeerMap::moves`] pairs the block lists of one request. It reads no lanes, so its cost
//!    depends on the blocks of the request and not on the number of layers.
//! 5. [`PeerMap::finishing`] returns the work that a consumer must do on its blocks afterwards.
//!
//! [`rows_into_block`] and [`rows_from_block`] are for engines that keep a dense tensor for each
//! sequence.
//!
//! ```
//! use kvx_vllm::ids::WorkerRank;
//! use kvx_vllm::mapping::*;
//! use kvx_core::{Indices, Op};
//! // Eight KV heads of 256 bytes a token; blocks of 16 tokens.
//! let caches = |tp: u64| {
//!     let block_len = 8 / tp * 16 * 256;
//!     let layer = |at: u64| LayerCache {
//!         name: format!("model.layers.{at}.attn").into(),
//!         tensors: KvTensors::Together(0x7f00_0000_0000 + at * 0x100_0000),
//!         blocks: 100,
//!         block_len,
//!         block_stride: block_len,
//!         group: 0,
//!         heads: Heads::Sharded(8),
//!         memory: MemoryType::Dram,
//!     };
//!     Caches::of_layers((0..2).map(layer).collect(), KvLayout::Lbhnc, 16, 1, 0)
//! };
//! // Rank 3 of four decode ranks reads the second half of rank 1 of two prefill ranks.
//! let (own, tp) = (caches(4)?, Tp::new(3, 4)?);
//! assert_eq!(handshake_ranks(tp, 2, 1)?, [1]);
//! let ranks = [(WorkerRank { pp: 0, tp: 1 }, caches(2)?.geometry().clone())];
//! let remote = Remote { tp_size: 2, pp_size: 1, dcp_size: 1, ranks: &ranks };
//! let map = PeerMap::new(Op::Read, &own, tp, &remote, &MappingOptions::default())?;
//! let half = map.sources()[0].lanes()[0];
//! assert_eq!((half.remote.grid.base, half.remote.grid.length, half.remote.grid.stride), (8192, 8192, 16384));
//!
//! // Two blocks are cached here: the list of the peer is cut at the front.
//! let (local, theirs) = ([Indices::from([7, 8])], [Indices::from([20, 21, 22, 23])]);
//! let moves = map.moves(&BlockPairs { local: &local, remote: &theirs, tokens: None })?;
//! let pairing = &moves.ranks[0].pairings[0];
//! assert_eq!(pairing.remote.as_list(), Some(&[22, 23][..]));
//! assert_eq!((moves.blocks, moves.bytes), (4, 4 * 8192));
//! # Ok::<(), kvx_core::Error>(())
//! ```

mod advertised;
mod align;
mod caches;
mod dense;
mod drawing;
mod geometry;
mod lanes;
mod layout;
mod lengths;
mod mooncake;
mod mooncake_map;
mod moves;
mod names;
mod pairing;
mod peer;
mod permute;
mod ranks;
mod slices;

pub use align::{Aligned, Clip, Tokens, Units, expand, window_blocks};
pub use caches::{Caches, KvTensors, LayerCache};
pub use dense::{BlockRows, DenseShape, rows_from_block, rows_into_block};
pub use geometry::{Geometry, KvRegion, MAX_REGIONS, MemorySpan, MemoryType, RegionGroup};
pub use lanes::{Lane, LaneSet, RegionGrid, Source};
pub use layout::{KvLayout, LayoutMatch};
pub use lengths::check_block_length;
pub use mooncake::{SenderPair, SenderPlan};
pub use mooncake_map::{SendLane, SendMap, tell_layout};
pub use moves::{BlockPairs, Covered, Moves, Pairing, RankMoves};
pub use names::natural_order;
pub use peer::{MappingOptions, Part, PeerMap, Remote};
pub use permute::{BlockShape, Finishing, permute_axes};
pub use ranks::{GroupKind, Heads, Mapping, Tp, handshake_ranks};
