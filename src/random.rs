//! Random bytes, straight from the kernel.

use anyhow::{Result, ensure};
use nix::libc;

#[allow(unsafe_code)]
pub fn bytes<const N: usize>() -> Result<[u8; N]> {
    const { assert!(N <= 256, "more may come in pieces") }
    let mut bytes = [0; N];
    // SAFETY: writes so many bytes into an array of that size.
    let length = unsafe { libc::getrandom(bytes.as_mut_ptr().cast(), N, 0) };
    ensure!(usize::try_from(length) == Ok(N), "the kernel gave no random bytes: {}", std::io::Error::last_os_error());
    Ok(bytes)
}
