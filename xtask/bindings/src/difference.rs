//! Finds the items that a newer header adds to the bindings of an older one.

use std::collections::{BTreeMap, BTreeSet};

use proc_macro2::{TokenStream, TokenTree};
use quote::ToTokens;
use syn::{File, Item};

use crate::name_of;

/// Keeps the items of `file` whose names contain one of `wanted` and that `known` does not contain
/// in the same form.
///
/// # Errors
/// Fails if a kept item needs one that is not kept, and that `known` contains in another form or
/// not at all.
pub(crate) fn keep_what_is_added(file: &mut File, known: &File, wanted: &[String]) -> Result<(), String> {
    let known: BTreeMap<_, _> = known.items.iter().filter_map(|item| Some((name_of(item)?, item))).collect();
    let is_known = |name: &str, item: &Item| known.get(name).is_some_and(|other| same(item, other));
    let is_wanted = |name: &String| wanted.iter().any(|part| name.contains(part.as_str()));
    let names = file.items.iter().filter_map(|item| name_of(item).filter(|name| !is_known(name, item)));
    let added: BTreeSet<String> = names.filter(is_wanted).collect();
    let kept = |item: &Item| match name_of(item) {
        Some(name) => added.contains(&name),
        // Assertions and implementations belong to the type that they mention.
        None => !matches!(item, Item::ForeignMod(_)) && words(item).iter().any(|word| added.contains(word)),
    };
    let needed: BTreeSet<String> = file.items.iter().filter(|item| kept(item)).flat_map(words).collect();
    for item in file.items.iter().filter(|item| !kept(item)) {
        if let Some(name) = name_of(item).filter(|name| needed.contains(name) && !is_known(name, item)) {
            return Err(format!(
                "{name} is needed, but differs from the older header: add it to `adds` in bindings.toml"
            ));
        }
    }
    file.items.retain(kept);
    Ok(())
}

fn same(one: &Item, other: &Item) -> bool {
    one.to_token_stream().to_string() == other.to_token_stream().to_string()
}

/// Returns every identifier of an item.
fn words(item: &Item) -> Vec<String> {
    let (mut found, mut left) = (Vec::new(), vec![item.to_token_stream()]);
    while let Some(stream) = left.pop() {
        for token in TokenStream::into_iter(stream) {
            match token {
                TokenTree::Ident(ident) => found.push(ident.to_string()),
                TokenTree::Group(group) => left.push(group.stream()),
                TokenTree::Punct(_) | TokenTree::Literal(_) => {}
            }
        }
    }
    found
}
