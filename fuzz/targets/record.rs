#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| molt_fuzz::hold("record", bytes));
