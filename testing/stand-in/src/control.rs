//! The exported function that executes a test's commands.

use crate::argument::Text;
use crate::code::{Answer, Code};
use crate::settings::{notify_streams, settings};
use crate::{devices, memory};

fn command(command: &Text) -> Answer<i64> {
    let command = command.get()?;
    if command.trim() == "allocated" {
        return Ok(memory::memory().allocated());
    }
    if ["well", "reset"].contains(&command.trim()) {
        devices::mend();
    }
    let answer = settings().apply(&command).ok_or(Code::INVALID_VALUE);
    notify_streams();
    answer
}

/// Executes a command of a test. Returns its answer, or -1 if there is no such command.
#[unsafe(no_mangle)]
extern "C" fn kvx_stand_in_control(text: Text) -> i64 {
    let done = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| command(&text)));
    done.unwrap_or(Err(Code::UNKNOWN)).unwrap_or(-1)
}
