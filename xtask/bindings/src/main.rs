//! Generates bindings to native libraries that are opened at run time: `kvx-bindings NAME INCLUDE [BESIDE]` prints the
//! Rust file of the row `NAME`, from the headers below the folder `INCLUDE`. `cargo xtask bindings` runs it.
//!
//! Functions become the fields of one struct of pointers, so that nothing is linked. A row that `adds` to another
//! takes that one's generated file as `BESIDE` and prints only what it does not have.

mod difference;
mod functions;

use std::collections::BTreeMap;
use std::error::Error;
use std::path::Path;
use std::process::ExitCode;

/// What is generated of a library.
struct Row {
    name: &'static str,
    /// The first line of the file ends in this.
    of: &'static str,
    headers: &'static [&'static str],
    /// Functions, a regular expression each.
    functions: &'static [&'static str],
    /// Types that no function leads to: mostly enumerations whose constants are passed as integers.
    types: &'static [&'static str],
    /// Constants of enumerations without a name.
    constants: &'static [&'static str],
    /// Types that are not generated because `uses` brings them.
    blocked: &'static [&'static str],
    /// What stands at the top of the file.
    uses: &'static str,
    /// Only items whose names contain one of these, and that `BESIDE` does not have; empty: everything.
    adds: &'static [&'static str],
}

/// What the C library defines.
const LIBC: &[&str] =
    &["FILE", "_IO_.*", "__.*_t", "sa_family_t", "sockaddr", "sockaddr_storage", "socklen_t"];

const ROWS: &[Row] = &[
    Row {
        name: "ucx",
        of: "the headers of UCX 1.13.1",
        headers: &["ucp/api/ucp.h"],
        functions: &[
            "ucp_am_(data_release|recv_data_nbx|send_nbx)",
            "ucp_cleanup",
            "ucp_config_(modify|print|read|release)",
            "ucp_context_(print_info|query)",
            "ucp_ep_(close_nbx|create|flush_nbx|print_info|query|rkey_unpack)",
            "ucp_get_(nbx|version|version_string)",
            "ucp_init_version",
            "ucp_mem_(map|query|unmap)",
            "ucp_put_nbx",
            "ucp_request_(cancel|check_status|free|query)",
            "ucp_rkey_(buffer_release|destroy|pack|ptr)",
            "ucp_worker_(arm|create|destroy|flush_nbx|get_address|get_efd|print_info|progress|query)",
            "ucp_worker_(release_address|set_am_recv_handler|signal|wait)",
            "ucs_status_string",
        ],
        types: &[
            "ucp_(ep|mem_map|worker)_params_field",
            "ucp_(context|ep|mem|req|worker)_attr_field",
            "ucp_(am_handler_param|params)_field",
            "ucp_(am_cb_flags|am_recv_attr_t|cb_param_flags|send_am_flags)",
            "ucp_(ep_close_flags_t|ep_params_flags_field|worker_address_flags_t|worker_flags_t)",
            "ucp_(dt_type|err_handling_mode_t|feature|op_attr_t|wakeup_event_types)",
            "ucs_(memory_type_t|status_t|thread_mode_t)",
        ],
        constants: &["UCP_MEM_MAP_.*"],
        blocked: LIBC,
        uses: "use libc::{FILE, sockaddr, sockaddr_storage, socklen_t};",
        adds: &[],
    },
    Row {
        name: "ucx-sgl",
        of: "the headers of UCX 1.22.0: what the scatter-gather datatype adds",
        headers: &["ucp/api/ucp.h"],
        functions: &[],
        types: &["ucp_dt_(local|remote)_sgl.*", "ucp_(dt_type|op_attr_t|request_param_t)"],
        constants: &[],
        blocked: LIBC,
        uses: "use super::bindings_1_13::*;",
        adds: &["sgl", "SGL", "ucp_request_param_t", "UCP_OP_ATTR_FIELD_REMOTE"],
    },
    Row {
        name: "libfabric",
        of: "the headers of libfabric 1.17.0",
        headers: &["rdma/fi_cm.h", "rdma/fi_rma.h"],
        functions: &["fi_(dupinfo|fabric|freeinfo|getinfo|strerror|version)"],
        types: &[
            "fi_(av_attr|cq_attr|cq_err_entry|cq_msg_entry|mr_attr)",
            "fi_(av_type|bus_type|cq_format|ep_type|hmem_iface|mr_mode|progress|threading|wait_obj)",
            "fi_ops_(av|cm|cq|domain|ep|fabric|mr|msg|rma)",
            "fid_(av|cq|domain|ep|fabric|mr|nic)",
        ],
        constants: &[
            "FI_(ADDR_STR|CONTEXT2?|ENABLE|GETWAIT|MAJOR_VERSION|MINOR_VERSION)",
            "FI_(DELIVERY_COMPLETE|HMEM|MSG|READ|RECV|REMOTE_(READ|WRITE)|RMA|SEND|TRANSMIT|WRITE)",
            "FI_E.*",
            "FI_MR_(ALLOCATED|COLLECTIVE|ENDPOINT|HMEM|LOCAL|MMU_NOTIFY|PROV_KEY|RAW|RMA_EVENT|VIRT_ADDR)",
        ],
        blocked: &["FILE", "__.*_t", "iovec"],
        uses: "use libc::iovec;",
        adds: &[],
    },
    Row {
        name: "mooncake",
        of: "kvx-mooncake/adapter/transfer_engine.h",
        headers: &["transfer_engine.h"],
        functions: &["[a-z][A-Za-z]+Engine", "[a-z]+[A-Z].*"],
        types: &[],
        constants: &[],
        blocked: &[],
        uses: "",
        adds: &[],
    },
    Row {
        name: "mooncake-adapter",
        of: "kvx-mooncake/adapter/adapter.h",
        headers: &["adapter.h"],
        functions: &["kvx_mooncake_.*"],
        types: &[],
        constants: &[],
        blocked: &["transfer_status"],
        uses: "use super::bindings::transfer_status;",
        adds: &[],
    },
    Row {
        name: "nixl",
        of: "kvx-rixl/src/ffi/nixl_capi.h",
        headers: &["nixl_capi.h"],
        functions: &["nixl_capi_.*"],
        types: &[],
        constants: &["NIXL_CAPI_.*"],
        blocked: &[],
        uses: "",
        adds: &[],
    },
];

fn main() -> ExitCode {
    match run() {
        Ok(text) => {
            print!("{text}");
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("kvx-bindings: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<String, Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let (name, include, beside) = match &arguments[..] {
        [name, include] => (name, include, None),
        [name, include, beside] => (name, include, Some(beside)),
        _ => return Err("usage: kvx-bindings NAME INCLUDE [BESIDE]".into()),
    };
    let row = ROWS.iter().find(|row| row.name == name).ok_or_else(|| format!("no row {name}"))?;
    let mut file = syn::parse_file(&generated(row, include)?)?;
    match (row.adds, beside) {
        ([], None) => {}
        ([], Some(_)) => return Err(format!("{name} adds to nothing").into()),
        (_, None) => return Err(format!("{name} adds to another file: name that, too").into()),
        (adds, Some(beside)) => {
            let known = syn::parse_file(&std::fs::read_to_string(beside)?)?;
            difference::keep_what_is_added(&mut file, &known, adds)?;
        }
    }
    functions::collect(&mut file)?;
    let top =
        format!("// Generated by `cargo xtask bindings` from {}; do not edit.\n\n{}\n\n", row.of, row.uses);
    Ok(top + &prettyplease::unparse(&file))
}

fn generated(row: &Row, include: &str) -> Result<String, Box<dyn Error>> {
    let mut builder = bindgen::Builder::default()
        .clang_arg(format!("-I{include}"))
        .default_enum_style(bindgen::EnumVariation::Consts)
        .prepend_enum_name(false)
        .derive_default(true)
        .derive_debug(false)
        .generate_comments(false)
        .disable_header_comment()
        .merge_extern_blocks(true)
        .rust_target(rust_version())
        .use_core()
        .formatter(bindgen::Formatter::None);
    for header in row.headers {
        let header = Path::new(include).join(header);
        builder = builder.header(header.to_str().ok_or("the folder's name is not UTF-8")?);
    }
    for name in row.functions {
        builder = builder.allowlist_function(name);
    }
    for name in row.types {
        builder = builder.allowlist_type(name);
    }
    for name in row.constants {
        builder = builder.allowlist_var(name);
    }
    for name in row.blocked {
        builder = builder.blocklist_type(name);
    }
    Ok(builder.generate()?.to_string())
}

/// The oldest compiler that kvx builds with.
fn rust_version() -> bindgen::RustTarget {
    bindgen::RustTarget::stable(88, 0).unwrap_or_else(|_| bindgen::RustTarget::default())
}

/// The name of what an item defines, or of the type that it is about.
fn name_of(item: &syn::Item) -> Option<String> {
    match item {
        syn::Item::Const(item) if item.ident != "_" => Some(item.ident.to_string()),
        syn::Item::Type(item) => Some(item.ident.to_string()),
        syn::Item::Struct(item) => Some(item.ident.to_string()),
        syn::Item::Union(item) => Some(item.ident.to_string()),
        _ => None,
    }
}

/// The items of a file that have names.
fn by_name(file: &syn::File) -> BTreeMap<String, &syn::Item> {
    file.items.iter().filter_map(|item| Some((name_of(item)?, item))).collect()
}
