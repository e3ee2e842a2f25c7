//! An output that several threads fill column by column.

use std::marker::PhantomData;

/// A borrowed output `[rows, width]` of which every column is written by one thread.
#[derive(Debug)]
pub(super) struct Columns<'a> {
    at: *mut f32,
    rows: usize,
    width: usize,
    output: PhantomData<&'a mut [f32]>,
}

// SAFETY: the only way to the floats is `write`, whose callers promise that no two threads write the same column.
unsafe impl Sync for Columns<'_> {}
// SAFETY: it stands for a mutable borrow of floats, which may go to another thread.
unsafe impl Send for Columns<'_> {}

impl<'a> Columns<'a> {
    /// Rows of `width` values.
    pub(super) fn new(output: &'a mut [f32], width: usize) -> Self {
        Self { at: output.as_mut_ptr(), rows: output.len() / width.max(1), width, output: PhantomData }
    }

    /// Writes values into a row from column `first` on.
    ///
    /// # Safety
    /// No other thread reads or writes these columns of that row meanwhile.
    ///
    /// # Panics
    /// Where the values lie outside of the output.
    pub(super) unsafe fn write(&self, row: usize, first: usize, values: &[f32]) {
        assert!(row < self.rows && first + values.len() <= self.width, "columns outside of the output");
        // SAFETY: the range was just shown to lie in the borrowed output; `values` is another slice, and the caller
        // promises that nobody else is at these columns.
        unsafe {
            let at = self.at.add(row * self.width + first);
            match <&[f32; 16]>::try_from(values) {
                // A whole wide tile: as a constant length it is one register, not a call.
                Ok(sixteen) => at.cast::<[f32; 16]>().write(*sixteen),
                Err(_) => std::ptr::copy_nonoverlapping(values.as_ptr(), at, values.len()),
            }
        }
    }
}
