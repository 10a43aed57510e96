//! Shortens what bindgen generates about the layout of types.

use quote::{ToTokens, quote};
use syn::{BinOp, Expr, File, Item, Stmt};

use crate::name_of;

/// Keeps the implementations of `Default` of the types in `wanted`, and writes each assertion about
/// a layout in one line.
///
/// # Errors
/// Fails if a type of `wanted` has no such implementation, or if bindgen writes its assertions in
/// another form.
pub(crate) fn shorten(file: &mut File, wanted: &[String]) -> Result<(), String> {
    let mut missing: Vec<&String> = wanted.iter().collect();
    file.items.retain(|item| match defaulted(item) {
        Some(name) => {
            let before = missing.len();
            missing.retain(|wanted| **wanted != name);
            missing.len() < before
        }
        None => true,
    });
    if !missing.is_empty() {
        return Err(format!("no type of `defaults` in bindings.toml has this name: {missing:?}"));
    }
    for item in &mut file.items {
        if let Some(name) = defaulted(item) {
            let name = syn::Ident::new(&name, proc_macro2::Span::call_site());
            *item = syn::parse_quote! {
                impl Default for #name {
                    fn default() -> Self {
                        unsafe { ::core::mem::zeroed() }
                    }
                }
            };
        } else if name_of(item).is_none() && matches!(item, Item::Const(_)) {
            *item = assertions(item)
                .ok_or_else(|| format!("not an assertion about a layout: {}", item.to_token_stream()))?;
        }
    }
    Ok(())
}

/// Returns the type for which an item implements `Default`.
fn defaulted(item: &Item) -> Option<String> {
    let Item::Impl(item) = item else { return None };
    let (_, path, _) = item.trait_.as_ref()?;
    path.is_ident("Default").then(|| item.self_ty.to_token_stream().to_string())
}

/// Converts `["text"][value - expected];` to `assert!(value == expected);`.
fn assertions(item: &Item) -> Option<Item> {
    let Item::Const(item) = item else { return None };
    let Expr::Block(block) = &*item.expr else { return None };
    let asserted = block.block.stmts.iter().map(|statement| {
        let Stmt::Expr(Expr::Index(index), _) = statement else { return None };
        let Expr::Binary(difference) = &*index.index else { return None };
        let (value, expected) = (&difference.left, &difference.right);
        let Expr::Lit(syn::ExprLit { lit: syn::Lit::Int(expected), .. }) = &**expected else { return None };
        let expected = proc_macro2::Literal::u64_unsuffixed(expected.base10_parse().ok()?);
        matches!(difference.op, BinOp::Sub(_)).then(|| quote!(assert!(#value == #expected);))
    });
    let asserted = asserted.collect::<Option<Vec<_>>>()?;
    syn::parse2(quote!(const _: () = { #(#asserted)* };)).ok()
}
