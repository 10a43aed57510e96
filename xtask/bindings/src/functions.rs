//! Turns declarations of functions into one struct of pointers to them.

use proc_macro2::Literal;
use quote::quote;
use syn::{File, ForeignItem, Item};

/// Replaces the `extern` blocks of `file` by a struct `Functions`; does nothing without such a
/// block.
pub(crate) fn collect(file: &mut File) -> syn::Result<()> {
    let (mut declared, mut rest) = (Vec::new(), Vec::new());
    for item in file.items.drain(..) {
        match item {
            Item::ForeignMod(block) => declared.extend(block.items),
            other => rest.push(other),
        }
    }
    file.items = rest;
    let (mut fields, mut values) = (Vec::new(), Vec::new());
    for item in declared {
        let ForeignItem::Fn(function) = item else {
            return Err(syn::Error::new_spanned(item, "neither a type nor a function"));
        };
        let syn::Signature { ident, inputs, output, .. } = function.sig;
        let symbol =
            Literal::c_string(&std::ffi::CString::new(ident.to_string()).expect("an identifier has no NUL"));
        fields.push(quote!(pub #ident: unsafe extern "C" fn(#inputs) #output));
        values.push(quote!(#ident: ::core::mem::transmute(symbol(#symbol)?)));
    }
    if fields.is_empty() {
        return Ok(());
    }
    file.items.push(syn::parse2(quote! {
        #[derive(Clone, Copy)]
        pub struct Functions { #(#fields),* }
    })?);
    // The caller of `find` promises that `symbol` returns the function of this name, and never
    // null.
    file.items.push(syn::parse2(quote! {
        impl Functions {
            pub unsafe fn find<E>(
                mut symbol: impl FnMut(&'static ::core::ffi::CStr) -> Result<::core::ptr::NonNull<::core::ffi::c_void>, E>
            ) -> Result<Self, E> {
                unsafe { Ok(Functions { #(#values),* }) }
            }
        }
    })?);
    Ok(())
}
