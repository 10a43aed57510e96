//! Copies of bytes from peers, for UCX to read.
//!
//! UCX reads addresses and keys without being told their length, and trusts them: it is shown a
//! copy that zeros follow.

/// Zeros behind the bytes: more than any count in them could skip.
const MARGIN: usize = 4096;

/// A copy that zeros follow.
pub(crate) fn pad(bytes: &[u8]) -> Vec<u8> {
    let mut copy = Vec::with_capacity(bytes.len() + MARGIN);
    copy.extend_from_slice(bytes);
    copy.resize(bytes.len() + MARGIN, 0);
    copy
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn zeros_follow_what_ucx_is_shown() {
        let shown = pad(b"key");
        assert_eq!((&shown[..3], shown.len()), (b"key".as_slice(), 3 + MARGIN));
        assert!(shown[3..].iter().all(|byte| *byte == 0));
    }
}
