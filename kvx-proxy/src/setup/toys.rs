//! The command lines of vLLM's toy proxies.

use super::{InstanceSetup, Pool};
use crate::error::{Error, Result};

impl Pool {
    /// Builds a pool from the arguments of `toy_proxy_server.py`: hosts and ports of prefill and
    /// decode instances. An empty list takes the toy's default: `localhost`, 8100, 8200.
    ///
    /// # Errors
    ///
    /// Fails if the numbers of hosts and ports differ, or a host is invalid.
    ///
    /// ```
    /// let pool = kvx_proxy::Pool::from_hosts_and_ports(&["10.0.0.1".into(), "::1".into()], &[8100, 8100], &[], &[]).unwrap();
    /// assert_eq!(pool.prefill[1].url, "http://[::1]:8100");
    /// assert_eq!(pool.decode[0].url, "http://localhost:8200");
    /// ```
    pub fn from_hosts_and_ports(
        prefill_hosts: &[String],
        prefill_ports: &[u16],
        decode_hosts: &[String],
        decode_ports: &[u16],
    ) -> Result<Pool> {
        Ok(Pool {
            prefill: pairs("prefill", prefill_hosts, prefill_ports, 8100)?,
            decode: pairs("decode", decode_hosts, decode_ports, 8200)?,
            ..Pool::default()
        })
    }

    /// Builds a pool from the arguments of `mooncake_connector_proxy.py`: each `--prefill` takes a
    /// URL and optionally a bootstrap port or `none`; each `--decode` takes a URL.
    ///
    /// # Errors
    ///
    /// Fails if an argument is invalid or in the wrong place; the message names it.
    ///
    /// ```
    /// let words = |text: &str| text.split(' ').map(str::to_owned).collect::<Vec<_>>();
    /// let prefill = words("http://a:8010 8998 http://b:8010 none http://c:8010");
    /// let pool = kvx_proxy::Pool::from_urls(&prefill, &words("http://d:8020")).unwrap();
    /// let ports: Vec<_> = pool.prefill.iter().map(|one| one.bootstrap_port).collect();
    /// assert_eq!(ports, [Some(8998), None, None]);
    /// ```
    pub fn from_urls(prefill: &[String], decode: &[String]) -> Result<Pool> {
        let mut pool = Pool::default();
        let mut words = prefill.iter().peekable();
        while let Some(word) = words.next() {
            if is_behind_url(word) {
                return Err(Error::new(format!(
                    "--prefill {word}: a bootstrap port must follow the URL of its instance"
                )));
            }
            let mut instance = InstanceSetup::new(word)?;
            if let Some(port) =
                words.next_if(|next| is_behind_url(next)).filter(|port| !is_none(port))
            {
                let number = port.parse().ok().filter(|number| *number > 0);
                instance.bootstrap_port = Some(number.ok_or_else(|| {
                    let name = instance.name();
                    Error::new(format!(
                        "bootstrap port {port} of {name} is not a port from 1 to 65535"
                    ))
                })?);
            }
            pool.prefill.push(instance);
        }
        pool.decode = decode.iter().map(|url| InstanceSetup::new(url)).collect::<Result<_>>()?;
        Ok(pool)
    }
}

fn is_none(word: &str) -> bool {
    word.eq_ignore_ascii_case("none")
}

/// Returns true if an argument belongs to the URL before it.
fn is_behind_url(word: &str) -> bool {
    is_none(word) || word.bytes().all(|byte| byte.is_ascii_digit())
}

fn pairs(role: &str, hosts: &[String], ports: &[u16], port: u16) -> Result<Vec<InstanceSetup>> {
    let default_host = ["localhost".to_owned()];
    let hosts = if hosts.is_empty() { &default_host[..] } else { hosts };
    let default_port = [port];
    let ports = if ports.is_empty() { &default_port[..] } else { ports };
    if hosts.len() != ports.len() {
        return Err(Error::new(format!(
            "there are {} {role} hosts and {} {role} ports; give each host its port",
            hosts.len(),
            ports.len()
        )));
    }
    let one = |(host, port): (&String, &u16)| {
        let bare = host.trim_start_matches('[').trim_end_matches(']');
        match bare.contains(':') {
            true => InstanceSetup::new(&format!("http://[{bare}]:{port}")),
            false => InstanceSetup::new(&format!("http://{bare}:{port}")),
        }
    };
    hosts.iter().zip(ports).map(one).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_must_match() {
        let hosts = ["a".to_owned(), "b".to_owned()];
        let error = Pool::from_hosts_and_ports(&hosts, &[1], &[], &[]).unwrap_err().to_string();
        assert!(error.contains("2 prefill hosts and 1 prefill ports"), "{error}");
        let error = Pool::from_hosts_and_ports(&[], &[], &hosts, &[]).unwrap_err().to_string();
        assert!(error.contains("2 decode hosts and 1 decode ports"), "{error}");
    }

    #[test]
    fn without_a_bootstrap_port_mooncakes_default_is_used() {
        let words =
            ["http://10.0.0.1:8010", "http://10.0.0.2:8010", "9000", "http://[::1]:8010", "none"];
        let pool = Pool::from_urls(&words.map(str::to_owned), &[]).unwrap();
        let addresses: Vec<_> = pool.prefill.iter().map(crate::fleet::bootstrap::address).collect();
        assert_eq!(
            addresses,
            ["http://10.0.0.1:8998", "http://10.0.0.2:9000", "http://[::1]:8998"]
        );
    }

    #[test]
    fn ports_in_the_wrong_place_are_named() {
        for words in [
            &["8998"][..],
            &["none"],
            &["http://a:1", "1", "2"],
            &["http://a:1", "none", "2"],
            &["http://a:1", "1", "none"],
            &["http://a:1", "0"],
            &["http://a:1", "70000"],
        ] {
            let words: Vec<String> = words.iter().map(|word| (*word).to_owned()).collect();
            assert!(Pool::from_urls(&words, &[]).is_err(), "{words:?}");
        }
    }
}
