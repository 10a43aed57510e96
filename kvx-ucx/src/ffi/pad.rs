//! Copies bytes from peers for UCX to read.
//!
//! UCX reads addresses and keys without knowing their length, and trusts them. It therefore gets a
//! copy that is followed by zeros.

/// The number of zeros after the bytes: more than any count in the bytes could skip.
const MARGIN: usize = 4096;

/// Returns a copy that is followed by zeros.
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
    fn zeros_follow_the_bytes_that_ucx_reads() {
        let shown = pad(b"key");
        assert_eq!((&shown[..3], shown.len()), (b"key".as_slice(), 3 + MARGIN));
        assert!(shown[3..].iter().all(|byte| *byte == 0));
    }
}
