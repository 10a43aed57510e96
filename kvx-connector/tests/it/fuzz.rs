//! Replays the inputs that fuzzing found (`cargo xtask fuzz`).

use kvx_connector::fuzz;
use kvx_testkit::test;

#[test]
fn what_fuzzing_found_is_held() {
    kvx_testkit::replay(fuzz::TARGETS);
}
