//! The attribute `#[kvx_testkit::test]`. It reads a function without a Rust parser, because it only
//! needs its attributes and its name.

#![forbid(unsafe_code)]

use proc_macro::{Delimiter, TokenStream, TokenTree};

/// Registers a function as a test of a program that ends its `main` with
/// `kvx_testkit::harness_main`.
///
/// The function takes nothing and returns `()` or a `Result` whose error can be shown. With
/// `own_process` (`#[kvx_testkit::test(own_process)]`), the harness runs it in a separate process,
/// for tests that count the resources of a process, change its environment, or load a library that
/// stays loaded.
#[proc_macro_attribute]
pub fn test(options: TokenStream, function: TokenStream) -> TokenStream {
    let own_process = match options.to_string().as_str() {
        "" => false,
        "own_process" => true,
        other => return error(&format!("`own_process` is the only option, not `{other}`")),
    };
    let Some(name) = name(function.clone()) else { return error("#[test] belongs on a function") };
    let conditions = conditions(function.clone());
    let registration = format!(
        "{conditions}
        const _: () = {{
            ::kvx_testkit::harness::submit! {{
                ::kvx_testkit::harness::RegisteredTest {{
                    path: concat!(module_path!(), \"::\", \"{name}\"),
                    own_process: {own_process},
                    run: || ::kvx_testkit::harness::Outcome::into_result({name}()),
                }}
            }}
        }};"
    );
    let mut output = function;
    match registration.parse::<TokenStream>() {
        Ok(registration) => output.extend(registration),
        Err(problem) => return error(&problem.to_string()),
    }
    output
}

/// Returns the name of the function: the identifier after the first `fn` outside of brackets.
fn name(function: TokenStream) -> Option<String> {
    let mut tokens = function.into_iter();
    tokens.find(|token| matches!(token, TokenTree::Ident(word) if word.to_string() == "fn"))?;
    match tokens.next()? {
        TokenTree::Ident(name) => Some(name.to_string()),
        _ => None,
    }
}

/// Returns the `#[cfg(…)]` attributes, which also apply to the registration.
fn conditions(function: TokenStream) -> String {
    let mut found = String::new();
    let mut tokens = function.into_iter();
    while let Some(token) = tokens.next() {
        match token {
            TokenTree::Punct(hash) if hash.as_char() == '#' => {}
            _ => break, // the attributes have ended
        }
        if let Some(TokenTree::Group(attribute)) = tokens.next()
            && attribute.delimiter() == Delimiter::Bracket
            && attribute.stream().to_string().starts_with("cfg")
        {
            found += &format!("#{attribute} ");
        }
    }
    found
}

fn error(problem: &str) -> TokenStream {
    format!("compile_error!({problem:?});").parse().unwrap_or_default()
}
