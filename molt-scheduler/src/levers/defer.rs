//! Lever 1, defer: a request waits outside. Nothing moves and nobody who is in is touched.
//!
//! It is exhausted before any other lever is used, because [`enforce`](super::enforce) never admits: admissions happen
//! only in rounds in which what runs fits as it is (see `climb`). The waiting are told once, when they first have to
//! wait, with their place and an estimate (see `round`).
