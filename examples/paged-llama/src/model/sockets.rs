//! Connects ranks by sockets, as the server does: rank 0 has one to each other rank. It sends them
//! its steps, and adds up the sums of all.

use std::io::{self, Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::chunk::{Chunk, LogitsScope};
use super::error::{ModelError, Result};
use super::pool::Pool;
use super::ranks::{Ranks, Shard, sum_in_tree};
use super::transformer::Model;

/// The longest message, in numbers; a longer one is an error.
const LONGEST: usize = 1 << 28;

/// Rank 0's connection to the other ranks.
struct Head {
    others: Mutex<Vec<UnixStream>>,
}

/// Another rank's connection to rank 0.
struct Member {
    rank: usize,
    head: Mutex<UnixStream>,
}

impl Shard {
    /// Returns rank 0, with a socket to each of the others. Each socket is an end of
    /// [`UnixStream::pair`], whose other end a thread or a process has. A rank that does not answer
    /// within `deadline` fails the step.
    ///
    /// # Errors
    /// Fails if the deadline is zero.
    pub fn head(others: Vec<UnixStream>, deadline: Duration) -> io::Result<Shard> {
        for socket in &others {
            socket.set_read_timeout(Some(deadline))?;
            socket.set_write_timeout(Some(deadline))?;
        }
        let size = others.len() + 1;
        Ok(Shard { rank: 0, size, ranks: Arc::new(Head { others: Mutex::new(others) }) })
    }

    /// Returns rank `rank` of `size`, with its socket to rank 0. Between steps it waits as long as
    /// rank 0 lives.
    pub fn member(rank: usize, size: usize, head: UnixStream) -> Shard {
        Shard { rank, size, ranks: Arc::new(Member { rank, head: Mutex::new(head) }) }
    }
}

impl Model {
    /// Runs the steps of rank 0 on this rank's pool, until rank 0 ends.
    ///
    /// # Errors
    /// Fails if a step fails here, or if rank 0 ends during a step.
    pub fn follow(&self, pool: &mut Pool) -> Result<()> {
        while let Some(words) = self.shard.ranks.next_step()? {
            let chunks = chunks_of(&words)
                .ok_or_else(|| ModelError::new("rank 0 announced an invalid step"))?;
            self.forward(pool, &chunks)?;
        }
        Ok(())
    }
}

impl Ranks for Head {
    fn announce_step(&self, chunks: &[Chunk<'_>]) -> Result<()> {
        let words = words_of(chunks);
        for (index, socket) in lock(&self.others).iter_mut().enumerate() {
            send(socket, &words).map_err(|error| gone(index + 1, &error))?;
        }
        Ok(())
    }

    fn sum(&self, values: &mut [f32]) -> Result<()> {
        let mut others = lock(&self.others);
        let mut given = vec![values.to_vec()];
        for (index, socket) in others.iter_mut().enumerate() {
            let words = receive(socket).map_err(|error| gone(index + 1, &error))?;
            let words = words.filter(|words| words.len() == values.len());
            let words = words.ok_or_else(|| {
                ModelError::new(format!("rank {} of the model ended during a step", index + 1))
            })?;
            given.push(words.into_iter().map(f32::from_bits).collect());
        }
        sum_in_tree(&mut given);
        let words: Vec<u32> = given[0].iter().map(|sum| sum.to_bits()).collect();
        for (index, socket) in others.iter_mut().enumerate() {
            send(socket, &words).map_err(|error| gone(index + 1, &error))?;
        }
        values.copy_from_slice(&given[0]);
        Ok(())
    }
}

impl Ranks for Member {
    fn sum(&self, values: &mut [f32]) -> Result<()> {
        let mut head = lock(&self.head);
        let words: Vec<u32> = values.iter().map(|value| value.to_bits()).collect();
        let sums = send(&mut head, &words)
            .and_then(|()| receive(&mut head))
            .map_err(|error| gone(0, &error))?;
        let sums = sums.filter(|sums| sums.len() == values.len());
        let sums = sums.ok_or_else(|| {
            ModelError::new(format!("rank 0 ended during a step of rank {}", self.rank))
        })?;
        values.iter_mut().zip(sums).for_each(|(value, sum)| *value = f32::from_bits(sum));
        Ok(())
    }

    fn next_step(&self) -> Result<Option<Vec<u32>>> {
        receive(&mut lock(&self.head)).map_err(|error| gone(0, &error))
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn gone(rank: usize, error: &io::Error) -> ModelError {
    ModelError::new(format!(
        "rank {rank} of the model does not answer ({error}): start the server again"
    ))
}

/// Encodes a step as numbers: for each chunk its start, its tokens and its blocks, with the length
/// before each list.
fn words_of(chunks: &[Chunk<'_>]) -> Vec<u32> {
    let mut words = Vec::new();
    for Chunk { tokens, start, blocks, .. } in chunks {
        words.push(*start as u32);
        for list in [tokens, blocks] {
            words.push(list.len() as u32);
            words.extend_from_slice(list);
        }
    }
    words
}

fn chunks_of(mut words: &[u32]) -> Option<Vec<Chunk<'_>>> {
    let mut chunks = Vec::new();
    while let Some((start, rest)) = words.split_first() {
        let (count, rest) = rest.split_first()?;
        let (tokens, rest) = rest.split_at_checked(*count as usize)?;
        let (count, rest) = rest.split_first()?;
        let (blocks, rest) = rest.split_at_checked(*count as usize)?;
        chunks.push(Chunk { tokens, start: *start as usize, blocks, logits: LogitsScope::None });
        words = rest;
    }
    Some(chunks)
}

fn send(socket: &mut UnixStream, words: &[u32]) -> io::Result<()> {
    let mut bytes = Vec::with_capacity(4 + 4 * words.len());
    bytes.extend((words.len() as u32).to_ne_bytes());
    bytes.extend(words.iter().flat_map(|word| word.to_ne_bytes()));
    socket.write_all(&bytes)
}

/// Receives a message; `None` if the other end has closed the socket between messages.
fn receive(socket: &mut UnixStream) -> io::Result<Option<Vec<u32>>> {
    let mut count = [0; 4];
    match socket.read_exact(&mut count) {
        Ok(()) => {}
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(None),
        Err(error) => return Err(error),
    }
    let count = u32::from_ne_bytes(count) as usize;
    if count > LONGEST {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "the message is too long"));
    }
    let mut bytes = vec![0; 4 * count];
    socket.read_exact(&mut bytes)?;
    Ok(Some(bytes.as_chunks::<4>().0.iter().map(|word| u32::from_ne_bytes(*word)).collect()))
}
