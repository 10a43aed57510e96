//! Reads from UCX's descriptions which protocols it has chosen for gets and puts.
//!
//! UCX chooses a protocol for each kind of memory key when the first operation is posted. From then
//! on a worker prints it, in tables that name the endpoint's configuration. Versions before about
//! 1.14 print none.

/// A table that UCX has printed.
#[derive(Debug, PartialEq, Eq)]
struct ProtocolTable<'a> {
    /// The endpoint's configuration: `kvx intra-node cfg#0`.
    configuration: &'a str,
    /// `remote memory write by ucp_put* from host memory to host`
    title: &'a str,
    /// Lengths, protocol, lanes.
    rows: Vec<[&'a str; 3]>,
}

/// Returns the protocols of the endpoint's configuration, such as `gets: 0..inf zero-copy
/// cma/memory; puts: …`. `endpoint` is the output of `ucp_ep_print_info`, `worker` that of
/// `ucp_worker_print_info`. Empty if UCX has chosen nothing yet, or its version prints no tables.
pub(crate) fn chosen(endpoint: &str, worker: &str) -> String {
    let Some(configuration) = tables(endpoint).first().map(|table| table.configuration) else {
        return String::new();
    };
    let tables = tables(worker);
    let parts = [("gets", "ucp_get"), ("puts", "ucp_put")].map(|(name, function)| {
        let own = tables.iter().filter(|table| table.configuration == configuration);
        let mut ways: Vec<String> =
            own.filter(|table| table.title.contains(function)).map(ProtocolTable::shown).collect();
        ways.dedup();
        if ways.is_empty() { String::new() } else { format!("{name}: {}", ways.join(" / ")) }
    });
    parts.into_iter().filter(|part| !part.is_empty()).collect::<Vec<_>>().join("; ")
}

impl ProtocolTable<'_> {
    fn shown(&self) -> String {
        let rows = self
            .rows
            .iter()
            .map(|[lengths, protocol, lanes]| format!("{lengths} {protocol} {lanes}"));
        rows.collect::<Vec<_>>().join(", ")
    }
}

/// Parses the tables in UCX's output: a configuration, a title and rows each.
fn tables(printed: &str) -> Vec<ProtocolTable<'_>> {
    let mut tables: Vec<ProtocolTable<'_>> = Vec::new();
    for line in printed.lines() {
        let line = line.trim_start_matches(['#', ' ']);
        let Some(inside) =
            line.strip_prefix('|').and_then(|rest| rest.trim_end().strip_suffix('|'))
        else {
            continue;
        };
        let cells: Vec<&str> = inside.split('|').map(str::trim).collect();
        match (&cells[..], tables.last_mut()) {
            ([one], _) if one.contains(" cfg#") => {
                tables.push(ProtocolTable { configuration: one, title: "", rows: Vec::new() });
            }
            ([one], Some(table)) => table.title = one,
            (["Range", ..], _) => {}
            ([lengths, protocol, lanes], Some(table)) => {
                table.rows.push([lengths, protocol, lanes])
            }
            _ => {}
        }
    }
    tables
}

#[cfg(test)]
mod tests {
    use super::*;

    const LANES: &str = "#\n# UCP endpoint \n#\n#               peer: <no debug data>\n\
        #                 lane[0]:  3:sysv/memory.0 md[2]           -> md[2]/sysv/sysdev[255] seg 4294967295 am \
        keepalive\n\
        #                 lane[1]:  4:posix/memory.0 md[3]          -> md[3]/posix/sysdev[255] seg 4294967295\n\
        #                 lane[2]:  5:cma/memory.0 md[4]            -> md[4]/cma/sysdev[255] seg 4294967295 rma_bw#0\n\
        #\n\
        # +-----------+--------------------+----------------+\n\
        # | kvx intra-node cfg#0                            |\n\
        # | active message by ucp_am_send* from host memory |\n\
        # +-----------+--------------------+----------------+\n\
        # |   Range   |    Description     |     Config     |\n\
        # +-----------+--------------------+----------------+\n\
        # |     0..92 | short              | sysv/memory    |\n\
        # | 8249..inf | multi-frag copy-in | sysv/memory    |\n\
        # +-----------+--------------------+----------------+\n";

    fn table(configuration: &str, title: &str, row: &str) -> String {
        format!(
            "# +--+--+--+\n# | {configuration} |\n# | {title} |\n# +--+--+--+\n# | Range | Description | Config \
             |\n{row}\n"
        )
    }

    #[test]
    fn the_tables_of_the_endpoints_own_configuration_count() {
        let get = "remote memory read by ucp_get*(multi) into host memory from host";
        let put = "remote memory write by ucp_put* from host memory to host";
        let worker = table("kvx intra-node cfg#0", get, "# | 0..inf | zero-copy | cma/memory |")
            + &table("kvx intra-node cfg#1", get, "# | 0..inf | software emulation | tcp/lo |")
            + &table("kvx intra-node cfg#0", put, "# | 0..inf | zero-copy | cma/memory |");
        assert_eq!(
            chosen(LANES, &worker),
            "gets: 0..inf zero-copy cma/memory; puts: 0..inf zero-copy cma/memory"
        );
        assert_eq!(chosen(LANES, ""), "");
        assert_eq!(chosen("", &worker), "");
        assert_eq!(chosen("", "|\n||\n# | x |\n| a | b | c |"), "");
    }
}
