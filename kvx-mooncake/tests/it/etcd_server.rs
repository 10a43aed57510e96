//! Tests engines that find each other through etcd. The engine's etcd client can be loaded only
//! with the engine, hence a separate process.

use kvx_testkit::{Etcd, test};

use crate::adapter;
use crate::exchange;

const TEST: &str = "agents_find_each_other_by_etcd";

#[test(own_process)]
fn agents_find_each_other_by_etcd() {
    if adapter::or_skip(TEST).is_none() {
        return;
    }
    let Some(etcd) = Etcd::start() else {
        return kvx_testkit::skip(TEST, "etcd is not installed", "apt install etcd-server");
    };
    assert_eq!(etcd.keys(), 0, "it has no keys yet");
    exchange::by_way_of(&format!("etcd://{}", etcd.address()), || {
        assert!(etcd.keys() > 0, "the engines have registered themselves");
    });
}
