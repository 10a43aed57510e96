//! The texts that the demo's servers continue.

use std::borrow::Cow;

/// The first chapter of "Pride and Prejudice" by Jane Austen, which is in the public domain.
pub(super) const CHAPTER: &str = include_str!("../../../demo-model/chapter.txt");

/// A text to continue.
pub(super) struct Opening {
    text: &'static str,
    /// The text is part of the novels that the demo's model was trained on.
    pub(super) verbatim: bool,
}

/// Openings of a few tokens to several blocks; the fourth begins like the third, so that servers
/// find its beginning in their caches.
pub(super) const OPENINGS: &[Opening] = &[
    Opening { text: "Elizabeth", verbatim: false },
    Opening { text: "The letter was short, and", verbatim: false },
    Opening {
        text: "Captain Harville came home from sea on a wet morning in October, with a parrot, a \
               wooden leg and two hundred pounds. His sister met him at the door.",
        verbatim: false,
    },
    Opening {
        text: "Captain Harville came home from sea on a wet morning in October, with a parrot, a \
               wooden leg and two hundred pounds. His sister met him at the door. She was delighted \
               with the parrot, but of the rest she",
        verbatim: false,
    },
    Opening { text: CHAPTER, verbatim: true },
];

impl Opening {
    /// Returns the whole text.
    pub(super) fn text(&self) -> &'static str {
        self.text.trim_end()
    }

    /// Returns the text, or a description of a long one.
    pub(super) fn name(&self) -> Cow<'static, str> {
        if self.text == CHAPTER {
            return "Chapter 1 of Pride and Prejudice, which the model was trained on".into();
        }
        self.text().into()
    }
}
