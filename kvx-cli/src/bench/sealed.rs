//! The limit for sealed payload: frames sealed as kvx does, with the same cipher but without a
//! protocol.

use std::io::{Error, ErrorKind, Read, Result, Write};
use std::net::TcpStream;

use aes_gcm::aead::AeadInOut as _;
use aes_gcm::{Aes256Gcm, KeyInit as _};

use super::bare::Mover;

/// The bytes before a frame's payload.
const HEADER: usize = 16;
/// The bytes after each sealed piece.
const TAG: usize = 16;
/// The payload of a record.
const RECORD: usize = (16 << 10) - TAG;
/// The payload of a frame.
const FRAME: usize = 16 * RECORD;

/// Returns a mover of blocks of `length` bytes, in memory at `base` that outlives the lane and that
/// nobody holds references into.
pub(crate) fn mover(base: u64, length: usize) -> Mover {
    let mut sealing = Sealing::new();
    Box::new(move |socket, blocks, send| {
        let cursor = Cursor { base, length, blocks, within: 0 };
        match send {
            // SAFETY: the memory of a bare connection outlives it.
            true => unsafe { sealing.send(socket, cursor) }.map(|()| true),
            // SAFETY: no references exist to the memory of a bare connection.
            false => unsafe { sealing.receive(socket, cursor) },
        }
    })
}

/// One end's cipher, the number of its next piece, and a frame.
struct Sealing {
    cipher: Box<Aes256Gcm>,
    number: u64,
    frame: Vec<u8>,
}

impl Sealing {
    /// Both ends use the same fixed key, which need not be secret.
    fn new() -> Self {
        Sealing { cipher: Box::new(Aes256Gcm::new(&[7; 32].into())), number: 0, frame: Vec::new() }
    }

    fn nonce(&mut self) -> [u8; 12] {
        let mut nonce = [0; 12];
        nonce[4..].copy_from_slice(&self.number.to_be_bytes());
        self.number += 1;
        nonce
    }

    /// Seals the bytes after `from`.
    fn seal(&mut self, from: usize) {
        let nonce = self.nonce().into();
        let sealed =
            self.cipher.encrypt_inout_detached(&nonce, &[], (&mut self.frame[from..]).into());
        self.frame.extend_from_slice(&sealed.expect("it is short"));
    }

    /// Opens `len` bytes of the frame, which their tag follows.
    fn open(&mut self, from: usize, len: usize) -> Result<()> {
        let nonce = self.nonce().into();
        let (piece, rest) = self.frame[from..].split_at_mut(len);
        let tag: [u8; TAG] = rest[..TAG].try_into().expect("it is as long");
        let opened = self.cipher.decrypt_inout_detached(&nonce, &[], piece.into(), &tag.into());
        opened.map_err(|_| Error::from(ErrorKind::InvalidData))
    }

    /// Sends blocks.
    ///
    /// # Safety
    /// The blocks lie in memory that can be read.
    unsafe fn send(&mut self, socket: &mut TcpStream, mut blocks: Cursor<'_>) -> Result<()> {
        while blocks.left() > 0 {
            self.frame.clear();
            self.frame.resize(HEADER, 1);
            self.seal(0);
            let mut space = FRAME;
            while space > 0 && blocks.left() > 0 {
                let (from, mut record) = (self.frame.len(), RECORD);
                while record > 0
                    && let Some((at, len)) = blocks.next(record)
                {
                    // SAFETY: the caller guarantees that the blocks can be read.
                    self.frame.extend_from_slice(unsafe {
                        std::slice::from_raw_parts(at as *const u8, len)
                    });
                    record -= len;
                }
                space -= self.frame.len() - from;
                self.seal(from);
            }
            socket.write_all(&self.frame)?;
        }
        Ok(())
    }

    /// Receives blocks. Returns false if the other end closed instead of sending the first byte.
    ///
    /// # Safety
    /// The blocks lie in memory that can be written, and nobody holds references into it.
    unsafe fn receive(&mut self, socket: &mut TcpStream, mut blocks: Cursor<'_>) -> Result<bool> {
        let mut is_first = true;
        while blocks.left() > 0 {
            let payload = blocks.left().min(FRAME);
            self.frame.resize(HEADER + TAG + payload + payload.div_ceil(RECORD) * TAG, 0);
            match socket.read_exact(&mut self.frame) {
                Err(error) if is_first && error.kind() == ErrorKind::UnexpectedEof => {
                    return Ok(false);
                }
                read => read?,
            }
            is_first = false;
            self.open(0, HEADER)?;
            let (mut from, mut left) = (HEADER + TAG, payload);
            while left > 0 {
                let record = left.min(RECORD);
                self.open(from, record)?;
                let mut at = 0;
                while let Some((to, len)) = blocks.next(record - at) {
                    // SAFETY: the caller guarantees that the blocks can be written and that no
                    // references exist; the frame is a separate vector.
                    unsafe {
                        std::ptr::copy_nonoverlapping(
                            self.frame[from + at..].as_ptr(),
                            to as *mut u8,
                            len,
                        );
                    }
                    at += len;
                }
                (from, left) = (from + record + TAG, left - record);
            }
        }
        Ok(true)
    }
}

/// A cursor over the bytes of blocks, in order.
struct Cursor<'a> {
    base: u64,
    length: usize,
    blocks: &'a [u32],
    /// The number of bytes of the first block that were passed.
    within: usize,
}

impl Cursor<'_> {
    fn left(&self) -> usize {
        self.blocks.len() * self.length - self.within
    }

    /// Returns the address and the length of the next bytes: at most `most`, or `None` if none are
    /// left or wanted.
    fn next(&mut self, most: usize) -> Option<(usize, usize)> {
        let block = *self.blocks.first()? as usize;
        let len = most.min(self.length - self.within);
        if len == 0 {
            return None;
        }
        let at = self.base as usize + block * self.length + self.within;
        self.within += len;
        if self.within == self.length {
            (self.blocks, self.within) = (&self.blocks[1..], 0);
        }
        Some((at, len))
    }
}
