//! The connection between a head and a host. With the fleet's secret both ends authenticate each
//! other and encrypt all messages.

use std::io;
use std::time::Duration;

use kvx_noise::{MESSAGE, NoiseHandshake, RECORD, Seals, derive_key};
use tokio::io::{
    AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _, DuplexStream, duplex, split,
};
use tokio::net::TcpStream;
use tokio::time::timeout;

use crate::kv::Secret;
use crate::model::{ModelError, Result};

/// The purpose of the key, and the prologue of the handshake.
const LABEL: &[u8] = b"kvx serve 1: a head and its hosts";
/// The bytes buffered in each direction.
const BUFFER: usize = 64 << 10;

/// The time after which a peer that accepts no bytes is lost.
const STALLED: Duration = Duration::from_secs(10);

/// A connection in both directions, encrypted or not.
pub(super) trait Connection: AsyncRead + AsyncWrite + Send + Unpin {}

impl<T: AsyncRead + AsyncWrite + Send + Unpin> Connection for T {}

/// An end of a connection.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Role {
    /// The end that has connected.
    Host,
    /// The end that has accepted.
    Head,
}

/// Authenticates the peer, as this end of the connection. A host without the secret gets no answer.
pub(super) async fn authenticate(
    mut stream: TcpStream,
    secret: Option<&Secret>,
    role: Role,
) -> Result<Box<dyn Connection>> {
    stream.set_nodelay(true).map_err(ModelError::of)?;
    let Some(secret) = secret else { return Ok(Box::new(stream)) };
    let key = derive_key(secret, LABEL);
    let (handshake, peer, own) = match role {
        Role::Host => (NoiseHandshake::initiator(&key, LABEL), "head", "this host"),
        Role::Head => (NoiseHandshake::responder(&key, LABEL), "host", "its head"),
    };
    let mut handshake = handshake.map_err(ModelError::of)?;
    if role == Role::Host {
        write_message(&mut stream, &mut handshake).await?;
    }
    if !read_message(&mut stream, &mut handshake).await {
        return Err(ModelError::new(format!(
            "the {peer} has not proven to have this fleet's secret: start it with the same \
             KVX_SECRET_FILE as {own}"
        )));
    }
    if role == Role::Head {
        write_message(&mut stream, &mut handshake).await?;
    }
    Ok(Box::new(seal(stream, handshake.seals())))
}

async fn write_message(stream: &mut TcpStream, handshake: &mut NoiseHandshake) -> Result<()> {
    let mut message = Vec::new();
    handshake.write(&[], &mut message).map_err(ModelError::of)?;
    stream.write_all(&message).await.map_err(ModelError::of)
}

/// Returns true if the other end has proven to have the secret.
async fn read_message(stream: &mut TcpStream, handshake: &mut NoiseHandshake) -> bool {
    let mut message = [0; MESSAGE];
    stream.read_exact(&mut message).await.is_ok() && handshake.read(&message).is_some()
}

/// Returns a stream that encrypts its bytes. It ends in both directions when either direction ends,
/// or when a byte was altered.
fn seal(stream: TcpStream, seals: Seals) -> DuplexStream {
    let (ours, inner) = duplex(BUFFER);
    tokio::spawn(async move {
        let Seals { mut sealer, mut opener } = seals;
        let (mut from_peer, mut to_peer) = stream.into_split();
        let (mut from_us, mut to_us) = split(inner);
        let send = async {
            let (mut plain, mut sealed) = (vec![0; RECORD], Vec::new());
            loop {
                let got = from_us.read(&mut plain).await?;
                if got == 0 {
                    return to_peer.shutdown().await;
                }
                sealed.clear();
                sealer.seal_stream(&plain[..got], &mut sealed);
                // A peer that accepts no bytes for this time is lost, even if its connection stays
                // open.
                timeout(STALLED, to_peer.write_all(&sealed)).await??;
            }
        };
        let receive = async {
            let (mut sealed, mut plain) = (Vec::with_capacity(2 * RECORD), Vec::new());
            while from_peer.read_buf(&mut sealed).await? > 0 {
                opener.open_stream(&mut sealed, &mut plain).map_err(io::Error::other)?;
                to_us.write_all(&plain).await?;
                plain.clear();
            }
            Ok(())
        };
        let ended: io::Result<()> = tokio::select! {
            ended = send => ended,
            ended = receive => ended,
        };
        if let Err(why) = ended {
            tracing::debug!("an encrypted connection has ended: {why}");
        }
    });
    ours
}

#[cfg(test)]
mod tests {
    use tokio::net::TcpListener;

    use super::*;

    fn secret(byte: u8) -> Secret {
        Secret::from_bytes([byte; Secret::LEN])
    }

    async fn meet(
        host: Option<&Secret>,
        head: Option<&Secret>,
    ) -> (Result<Box<dyn Connection>>, Result<Box<dyn Connection>>) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let stream = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        let (accepted, _) = listener.accept().await.unwrap();
        tokio::join!(
            authenticate(stream, host, Role::Host),
            authenticate(accepted, head, Role::Head)
        )
    }

    #[tokio::test]
    async fn both_ends_read_what_the_other_has_written() {
        for secret in [None, Some(secret(1))] {
            let (host, head) = meet(secret.as_ref(), secret.as_ref()).await;
            let (mut host, mut head) = (host.unwrap(), head.unwrap());
            let long = vec![7; 3 * RECORD + 1];
            let mut heard = vec![0; long.len()];
            for _ in 0..2 {
                let (written, read) =
                    tokio::join!(host.write_all(&long), head.read_exact(&mut heard));
                written.unwrap();
                read.unwrap();
                assert!(heard == long);
                std::mem::swap(&mut host, &mut head);
            }
            drop(host);
            assert_eq!(
                head.read(&mut heard).await.unwrap(),
                0,
                "the end of the stream must arrive"
            );
        }
    }

    #[tokio::test]
    async fn another_secret_is_no_way_in() {
        let (host, head) = meet(Some(&secret(1)), Some(&secret(2))).await;
        for ended in [host.err(), head.err()] {
            assert!(ended.unwrap().to_string().contains("KVX_SECRET_FILE"));
        }
    }
}
