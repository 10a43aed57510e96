//! Turns declarations of functions into one table of pointers to them.

use proc_macro2::Literal;
use quote::quote;
use syn::{File, ForeignItem, Item};

/// The start of the implementation that [`collect`] adds.
const IMPLEMENTATION: &str = "unsafe impl ::kvx_backend::loader::FunctionTable";

/// Replaces the `extern` blocks of `file` by a struct `Functions`, which `kvx_backend` resolves;
/// does nothing without such a block.
pub(crate) fn collect(file: &mut File) -> syn::Result<()> {
    let (mut declared, mut rest) = (Vec::new(), Vec::new());
    for item in file.items.drain(..) {
        match item {
            Item::ForeignMod(block) => declared.extend(block.items),
            other => rest.push(other),
        }
    }
    file.items = rest;
    let (mut fields, mut rows) = (Vec::new(), Vec::new());
    for item in declared {
        let ForeignItem::Fn(function) = item else {
            return Err(syn::Error::new_spanned(item, "neither a type nor a function"));
        };
        let syn::Signature { ident, inputs, output, .. } = function.sig;
        let name = std::ffi::CString::new(ident.to_string()).expect("an identifier has no NUL");
        let name = Literal::c_string(&name);
        rows.push(quote!((#name, ::core::mem::offset_of!(Functions, #ident))));
        fields.push(quote!(pub #ident: unsafe extern "C" fn(#inputs) #output));
    }
    if fields.is_empty() {
        return Ok(());
    }
    file.items.push(syn::parse2(quote! {
        #[repr(C)]
        #[derive(Clone, Copy)]
        pub struct Functions { #(#fields),* }
    })?);
    file.items.push(syn::parse2(quote! {
        unsafe impl ::kvx_backend::loader::FunctionTable for Functions {
            const FIELDS: &'static [(&'static ::core::ffi::CStr, usize)] = &[#(#rows),*];
        }
    })?);
    Ok(())
}

/// Adds the reason why the implementation is sound, which syntax trees cannot contain.
pub(crate) fn justify(text: &str) -> String {
    let reason = "// SAFETY: each field is a pointer to the function that its header declares with its name.";
    text.replace(IMPLEMENTATION, &format!("{reason}\n{IMPLEMENTATION}"))
}
