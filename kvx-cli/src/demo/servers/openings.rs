//! The texts that the demo's servers continue.

/// The first chapter of "Pride and Prejudice" by Jane Austen, which is in the public domain.
pub(super) const CHAPTER: &str = include_str!("../../../demo-model/chapter.txt");

/// A text to continue.
pub(super) struct Opening(&'static str);

/// Openings of a few tokens to several blocks; the fourth begins like the third, so that servers
/// find its beginning in their caches.
pub(super) const OPENINGS: &[Opening] = &[
    Opening("Elizabeth"),
    Opening("The letter was short, and"),
    Opening(
        "Captain Harville came home from sea on a wet morning in October, with a parrot, a \
               wooden leg and two hundred pounds. His sister met him at the door.",
    ),
    Opening(
        "Captain Harville came home from sea on a wet morning in October, with a parrot, a \
               wooden leg and two hundred pounds. His sister met him at the door. She was delighted \
               with the parrot, but of the rest she",
    ),
    Opening(CHAPTER),
];

impl Opening {
    /// Returns the whole text.
    pub(super) fn text(&self) -> &'static str {
        self.0.trim_end()
    }

    /// Returns the text, or the title of a long one.
    pub(super) fn name(&self) -> &'static str {
        if self.is_chapter() { "Chapter 1 of Pride and Prejudice" } else { self.text() }
    }

    /// Returns whether the demo's own model was trained on this text.
    pub(super) fn is_chapter(&self) -> bool {
        self.0 == CHAPTER
    }
}
