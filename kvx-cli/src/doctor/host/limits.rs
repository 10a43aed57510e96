//! Limits, memory and the clock.

use super::super::finding::Finding;
use super::system::{bytes, rdma_devices, read};

/// Descriptors below this are too few for an engine with a hundred peers.
const FEW_FILES: u64 = 8192;
/// `/dev/shm` below this holds no pool of a model; 64 MiB is a container's default.
const SMALL_SHM: u64 = 1 << 30;

pub(super) fn examine() -> Vec<Finding> {
    let limits = read("/proc/self/limits").unwrap_or_default();
    let rdma = rdma_devices();
    let mut found = vec![
        files(limit(&limits, "Max open files")),
        locked(limit(&limits, "Max locked memory"), &rdma),
        shared_memory(),
        huge_pages(
            &read("/proc/meminfo").unwrap_or_default(),
            read("/sys/kernel/mm/transparent_hugepage/shmem_enabled").as_deref(),
        ),
    ];
    found.extend(clock());
    found
}

/// A soft and a hard limit; `u64::MAX` is none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Limit {
    soft: u64,
    hard: u64,
}

/// Finds a limit in the text of `/proc/self/limits`.
fn limit(text: &str, name: &str) -> Option<Limit> {
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    let mut values = line.split_ascii_whitespace().map(|value| match value {
        "unlimited" => Some(u64::MAX),
        value => value.parse().ok(),
    });
    Some(Limit { soft: values.next()??, hard: values.next()?? })
}

fn files(limit: Option<Limit>) -> Finding {
    let topic = "open files";
    let Some(Limit { soft, hard }) = limit else {
        return Finding::note(topic, "the limit cannot be read");
    };
    if soft >= FEW_FILES {
        return Finding::ok(topic, format!("at most {}", count(soft)));
    }
    Finding::warning(topic, format!("at most {soft}"))
        .because("a TCP link takes 3 descriptors, and a router's client one: a big fleet runs out")
        .cure(match hard > soft {
            true => format!(
                "`ulimit -n {}` in the shell that starts the engine, or LimitNOFILE= in its unit",
                hard.min(1 << 20)
            ),
            false => "as root raise the hard limit: LimitNOFILE= in the unit, or `--ulimit \
                      nofile=65536` of the container"
                .to_owned(),
        })
}

fn count(limit: u64) -> String {
    if limit == u64::MAX { "no limit".to_owned() } else { limit.to_string() }
}

fn locked(limit: Option<Limit>, rdma: &[String]) -> Finding {
    let topic = "locked memory";
    let Some(Limit { soft, .. }) = limit else {
        return Finding::note(topic, "the limit cannot be read");
    };
    if soft == u64::MAX {
        return Finding::ok(topic, "no limit");
    }
    let what = format!("at most {} (RLIMIT_MEMLOCK)", bytes(soft));
    if rdma.is_empty() {
        return Finding::note(topic, what)
            .because("only RDMA and pools with `lock` need more; this host has no RDMA device");
    }
    Finding::problem(topic, what)
        .because(format!(
            "{} locks all memory that it reads or writes: the registration of a KV cache fails",
            rdma.join(", ")
        ))
        .cure(
            "`ulimit -l unlimited` in the shell that starts the engine, LimitMEMLOCK=infinity in \
             its unit, or `--ulimit memlock=-1` of the container",
        )
}

fn shared_memory() -> Finding {
    let topic = "/dev/shm";
    match rustix::fs::statvfs("/dev/shm") {
        Ok(found) => shm(found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize),
        Err(error) => Finding::warning(topic, format!("cannot be used: {error}"))
            .because("engines and PyTorch keep shared memory there")
            .cure("mount a tmpfs there"),
    }
}

fn shm(size: u64, free: u64) -> Finding {
    let topic = "/dev/shm";
    let what = format!("{} free of {}", bytes(free), bytes(size));
    if size >= SMALL_SHM && free >= SMALL_SHM / 4 {
        return Finding::ok(topic, what);
    }
    let finding = Finding::warning(topic, what).because(
        "vLLM's workers and PyTorch keep shared memory there, and end with SIGBUS when it is full \
         (kvx's own pools do not need it)",
    );
    match size < SMALL_SHM {
        true => finding.cure(
            "`docker run --shm-size=16g`; in Kubernetes mount an emptyDir with `medium: Memory`",
        ),
        false => finding.cure("remove what ended programs have left: `ls -l /dev/shm`"),
    }
}

fn huge_pages(meminfo: &str, shmem: Option<&str>) -> Finding {
    let number = |name: &str| -> Option<u64> {
        let line = meminfo.lines().find_map(|line| line.strip_prefix(name))?;
        line.split_ascii_whitespace().next()?.parse().ok()
    };
    let (total, free) = (number("HugePages_Total:"), number("HugePages_Free:"));
    let size = number("Hugepagesize:").unwrap_or_default() << 10;
    let topic = "huge pages";
    match (total, free) {
        (Some(total), Some(free)) if total > 0 => {
            Finding::ok(topic, format!("{free} free of {total}, of {} each", bytes(size)))
        }
        _ => {
            let chosen = shmem.and_then(|text| text.split(['[', ']']).nth(1)).unwrap_or("unknown");
            Finding::note(topic, format!("none reserved; for shared memory on demand: {chosen}"))
                .because("pools with huge pages copy up to a tenth faster; others need none")
        }
    }
}

/// Examines whether something keeps the clock right.
fn clock() -> Option<Finding> {
    // SAFETY: a `timex` of zeros is valid, and asks for no change.
    let mut state: libc::timex = unsafe { std::mem::zeroed() };
    // SAFETY: `state` is valid for writes.
    let answer = unsafe { libc::adjtimex(&raw mut state) };
    match answer {
        -1 => None,
        libc::TIME_ERROR => Some(
            Finding::note(
                "clock",
                "nothing keeps it in step with other clocks, as far as the \
                 kernel knows",
            )
            .because(
                "registrations in etcd are signed with their time: 10 minutes of \
                     difference refuse them",
            )
            .cure("run chrony, systemd-timesyncd or ntpd on the host"),
        ),
        _ => Some(Finding::ok("clock", "is kept in step with others")),
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::finding::Level;
    use super::*;

    const LIMITS: &str = "Limit                     Soft Limit           Hard Limit           Units     \n\
        Max open files            1024                 524288               files     \n\
        Max locked memory         8388608              unlimited            bytes     \n";

    #[test]
    fn few_descriptors_are_a_warning_with_the_command_that_raises_them() {
        let few = files(limit(LIMITS, "Max open files"));
        assert_eq!((few.level, &*few.what), (Level::Warning, "at most 1024"));
        assert!(few.cure.unwrap().contains("ulimit -n 524288"));
        let hard = files(Some(Limit { soft: 256, hard: 256 }));
        assert!(hard.cure.unwrap().contains("LimitNOFILE"));
        assert_eq!(files(Some(Limit { soft: 1 << 20, hard: 1 << 20 })).level, Level::Ok);
        assert_eq!(files(limit("", "Max open files")).level, Level::Note);
    }

    #[test]
    fn a_limit_of_locked_memory_is_a_problem_with_rdma_only() {
        let limit = limit(LIMITS, "Max locked memory");
        assert_eq!(limit, Some(Limit { soft: 8 << 20, hard: u64::MAX }));
        assert_eq!(locked(limit, &[]).level, Level::Note);
        let with_card = locked(limit, &["mlx5_0".to_owned()]);
        assert_eq!(with_card.level, Level::Problem);
        assert!(with_card.why.unwrap().contains("mlx5_0"));
        let none = Some(Limit { soft: u64::MAX, hard: u64::MAX });
        assert_eq!(locked(none, &["mlx5_0".to_owned()]).level, Level::Ok);
    }

    #[test]
    fn a_containers_shared_memory_is_too_small() {
        let small = shm(64 << 20, 64 << 20);
        assert_eq!((small.level, &*small.what), (Level::Warning, "64 MiB free of 64 MiB"));
        assert!(small.cure.unwrap().contains("--shm-size"));
        assert!(shm(8 << 30, 1 << 20).cure.unwrap().contains("ls -l /dev/shm"));
        assert_eq!(shm(8 << 30, 7 << 30).level, Level::Ok);
    }

    #[test]
    fn huge_pages_are_counted() {
        let meminfo =
            "HugePages_Total:      64\nHugePages_Free:       60\nHugepagesize:       2048 kB";
        assert_eq!(huge_pages(meminfo, None).what, "60 free of 64, of 2 MiB each");
        let none = huge_pages("HugePages_Total: 0", Some("always within_size advise [never] deny"));
        assert_eq!(
            (none.level, &*none.what),
            (Level::Note, "none reserved; for shared memory on demand: never")
        );
    }
}
