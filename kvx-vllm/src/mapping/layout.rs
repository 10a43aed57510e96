//! The order of the dimensions of a KV cache, and the orders that two engines can combine.

use std::fmt;

use kvx_core::{ErrorKind, Result};

use super::geometry::shown;

/// The order of dimensions, outermost first: L layer, B block, H head, N token, C content of a head
/// and token.
///
/// The table shows the content of one layer's block, outermost first, by the attention backend that
/// vLLM names in a handshake. kvx moves blocks whole and does not interpret them, so an engine must
/// use the layout of the vLLM that it exchanges blocks with. Between engines of your own any layout
/// works that is the same on both sides, such as `Lbnhc`. It matters only if their tensor-parallel
/// sizes differ, since kvx then divides blocks by heads.
///
/// | vLLM's attention backend | layout | a block of a layer | caches | verified by |
/// |---|---|---|---|---|
/// | `CPU_ATTN` | `LBHNC` | for each head its keys `[dim][token]`, then its values `[token][dim]` | [`KvTensors::Together`], [`Caches::with_transposed_keys`] | runs with vLLM 0.32, both ways |
/// | `FLASH_ATTN`, recent versions | `LBHNC` | for each head and token its key, then its value | [`KvTensors::Together`] | vLLM's source; not run |
/// | `FLASH_ATTN`, recent versions | `LBNHC` | for each token and head its key, then its value | [`KvTensors::Together`] | vLLM's source; not run |
/// | `FLASH_ATTN` up to 0.20 | `HND`, `NHD` | keys and values in separate regions | [`KvTensors::Apart`] | vLLM's source; not run |
/// | `FLASHINFER` up to 0.20 | `HND`, `NHD` | a half of keys, then a half of values, moved separately | [`KvTensors::Halves`] | vLLM's source; not run |
/// | MLA | any | one latent for each token | [`KvTensors::Together`], [`Heads::Replicated`] | vLLM's source; not run |
/// | `TRITON_ATTN`, `FLEX_ATTENTION`, `TREE_ATTN`, `XPU_ATTN`, `ROCM_ATTN`, `ROCM_AITER_*` | unknown | | | nothing; two engines with the same backend exchange blocks whole |
/// | `FLASHINFER`, recent versions | unknown | | | nothing; as above |
/// | any, blocks of all layers together or heads outermost | `BLHNC`, `BLNHC`, `BHLNC`, `LHBNC` | unknown | | nothing; as above |
///
/// [`KvTensors::Together`]: super::KvTensors::Together
/// [`KvTensors::Apart`]: super::KvTensors::Apart
/// [`KvTensors::Halves`]: super::KvTensors::Halves
/// [`Caches::with_transposed_keys`]: super::Caches::with_transposed_keys
/// [`Heads::Replicated`]: super::Heads::Replicated
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum KvLayout {
    /// Tokens before heads; formerly NHD.
    Lbnhc,
    /// Heads before tokens; formerly HND.
    Lbhnc,
    /// Heads before blocks.
    Lhbnc,
    /// Blocks of all layers, heads before tokens.
    Blhnc,
    /// Blocks of all layers, tokens before heads.
    Blnhc,
    /// Blocks of all layers, heads before layers.
    Bhlnc,
}

impl KvLayout {
    /// All layouts.
    pub const ALL: [KvLayout; 6] = [
        KvLayout::Lbnhc,
        KvLayout::Lbhnc,
        KvLayout::Lhbnc,
        KvLayout::Blhnc,
        KvLayout::Blnhc,
        KvLayout::Bhlnc,
    ];

    /// Parses a name on the wire, old or new. Errors: `Malformed`.
    pub fn from_wire(name: &str) -> Result<Self> {
        let by_name = |layout: &KvLayout| layout.as_str() == name;
        match name {
            "NHD" => Ok(KvLayout::Lbnhc),
            "HND" => Ok(KvLayout::Lbhnc),
            _ => KvLayout::ALL.into_iter().find(by_name).ok_or_else(|| {
                ErrorKind::Malformed.because(format!(
                    "unknown KV cache layout {:?}: expected NHD, HND or an order of L, B, H, N, C",
                    shown(name)
                ))
            }),
        }
    }

    /// Returns the name.
    pub fn as_str(self) -> &'static str {
        match self {
            KvLayout::Lbnhc => "LBNHC",
            KvLayout::Lbhnc => "LBHNC",
            KvLayout::Lhbnc => "LHBNC",
            KvLayout::Blhnc => "BLHNC",
            KvLayout::Blnhc => "BLNHC",
            KvLayout::Bhlnc => "BHLNC",
        }
    }

    /// Returns the name up to vLLM 0.28, which had two layouts.
    pub fn old_name(self) -> Option<&'static str> {
        match self {
            KvLayout::Lbnhc => Some("NHD"),
            KvLayout::Lbhnc => Some("HND"),
            _ => None,
        }
    }

    /// Returns whether a range of heads is a range of bytes of a block.
    pub fn has_contiguous_heads(self) -> bool {
        matches!(self, KvLayout::Lbhnc | KvLayout::Blhnc | KvLayout::Bhlnc)
    }

    /// Returns whether the blocks of a layer have heads before tokens.
    pub fn heads_before_tokens(self) -> bool {
        !matches!(self, KvLayout::Lbnhc | KvLayout::Blnhc)
    }
}

impl fmt::Display for KvLayout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// The relation between a consumer's layout and a producer's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LayoutMatch {
    /// Bytes are moved as they are.
    Same,
    /// The consumer receives LBHNC and permutes it to LBNHC afterwards.
    Permute,
}

impl LayoutMatch {
    /// Returns how a consumer of layout `consumer` can use blocks of layout `producer`. Not needed
    /// for caches without heads (MLA). `enable_permute_local_kv` allows LBHNC into LBNHC, for
    /// models with one group.
    ///
    /// # Errors
    /// `Incompatible`, with both layouts and the remedy.
    pub fn of(
        consumer: KvLayout,
        producer: KvLayout,
        enable_permute_local_kv: bool,
        groups: usize,
    ) -> Result<Self> {
        if consumer == producer {
            return Ok(LayoutMatch::Same);
        }
        let permutable = (consumer, producer) == (KvLayout::Lbnhc, KvLayout::Lbhnc);
        let why = match (permutable, enable_permute_local_kv, groups) {
            (true, true, ..=1) => return Ok(LayoutMatch::Permute),
            (true, true, _) => "enable_permute_local_kv does not work with several KV cache groups",
            (true, false, _) => "set enable_permute_local_kv, or give both sides the same layout",
            (false, ..) => "only LBHNC can be received into LBNHC: give both sides the same layout",
        };
        Err(ErrorKind::Incompatible.because(format!(
            "the KV cache layouts differ: {consumer} at the consumer, {producer} at the \
             producer; {why}"
        )))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_old_and_new() {
        for layout in KvLayout::ALL {
            assert_eq!(KvLayout::from_wire(layout.as_str()).unwrap(), layout);
            if let Some(old) = layout.old_name() {
                assert_eq!(KvLayout::from_wire(old).unwrap(), layout);
            }
        }
        let error = KvLayout::from_wire(&"x".repeat(10_000)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Malformed);
        assert!(error.to_string().len() < 300);
    }

    #[test]
    fn only_heads_first_into_tokens_first_is_permuted() {
        use KvLayout::{Blhnc, Lbhnc, Lbnhc};
        assert_eq!(LayoutMatch::of(Lbhnc, Lbhnc, false, 3).unwrap(), LayoutMatch::Same);
        assert_eq!(LayoutMatch::of(Lbnhc, Lbhnc, true, 1).unwrap(), LayoutMatch::Permute);
        for (consumer, producer, permute, groups) in [
            (Lbnhc, Lbhnc, false, 1),
            (Lbnhc, Lbhnc, true, 2),
            (Lbhnc, Lbnhc, true, 1),
            (Blhnc, Lbhnc, true, 1),
        ] {
            let error = LayoutMatch::of(consumer, producer, permute, groups).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Incompatible);
            assert!(error.to_string().contains(consumer.as_str()), "{error}");
        }
    }
}
