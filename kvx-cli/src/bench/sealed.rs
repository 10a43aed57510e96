//! The limit where payload is sealed: frames as kvx seals them, by the same cipher, with no
//! protocol.

use std::io::{Error, ErrorKind, Read, Result, Write};
use std::net::TcpStream;

use aes_gcm::aead::AeadInOut as _;
use aes_gcm::{Aes256Gcm, KeyInit as _};

use super::bare::Mover;

/// Bytes before a frame's payload.
const HEADER: usize = 16;
/// Bytes behind each sealed piece.
const TAG: usize = 16;
/// Payload of a record.
const RECORD: usize = (16 << 10) - TAG;
/// Payload of a frame.
const FRAME: usize = 16 * RECORD;

/// Moves blocks of `length` bytes, of memory at `base` that outlives the lane and that nobody holds
/// references into.
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
    /// Both ends have the same key, which nobody is to be kept from.
    fn new() -> Self {
        Sealing { cipher: Box::new(Aes256Gcm::new(&[7; 32].into())), number: 0, frame: Vec::new() }
    }

    fn nonce(&mut self) -> [u8; 12] {
        let mut nonce = [0; 12];
        nonce[4..].copy_from_slice(&self.number.to_be_bytes());
        self.number += 1;
        nonce
    }

    /// Seals what was appended since `from`.
    fn seal(&mut self, from: usize) {
        let nonce = self.nonce().into();
        let sealed =
            self.cipher.encrypt_inout_detached(&nonce, &[], (&mut self.frame[from..]).into());
        self.frame.extend_from_slice(&sealed.expect("it is short"));
    }

    /// Opens so many bytes of the frame; their tag follows.
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
    /// They lie in memory that can be read.
    unsafe fn send(&mut self, socket: &mut TcpStream, mut blocks: Cursor<'_>) -> Result<()> {
        while blocks.left() > 0 {
            self.frame.clear();
            self.frame.resize(HEADER, 1);
            self.seal(0);
            let mut room = FRAME;
            while room > 0 && blocks.left() > 0 {
                let (from, mut record) = (self.frame.len(), RECORD);
                while record > 0
                    && let Some((at, len)) = blocks.next(record)
                {
                    // SAFETY: the caller's promise.
                    self.frame.extend_from_slice(unsafe {
                        std::slice::from_raw_parts(at as *const u8, len)
                    });
                    record -= len;
                }
                room -= self.frame.len() - from;
                self.seal(from);
            }
            socket.write_all(&self.frame)?;
        }
        Ok(())
    }

    /// Receives blocks. False: the other end has closed instead of sending the first byte.
    ///
    /// # Safety
    /// They lie in memory that can be written, and nobody holds references into it.
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
                    // SAFETY: the caller's promise; the frame is a vector of our own.
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

/// The bytes of blocks, in order.
struct Cursor<'a> {
    base: u64,
    length: usize,
    blocks: &'a [u32],
    /// How many bytes of the first block were passed.
    within: usize,
}

impl Cursor<'_> {
    fn left(&self) -> usize {
        self.blocks.len() * self.length - self.within
    }

    /// Where the next bytes lie, and how many: at most `most`, none when none are left or wanted.
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
