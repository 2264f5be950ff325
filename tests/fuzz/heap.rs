//! Counts the memory that a thread takes, so that an input that asks for too much is noticed.
#![allow(unsafe_code)]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

struct Counting;

#[global_allocator]
static HEAP: Counting = Counting;

thread_local! {
    /// May be negative: what one thread took another may give back.
    static TAKEN: Cell<isize> = const { Cell::new(0) };
    static MOST: Cell<isize> = const { Cell::new(0) };
}

/// Returns what is taken now.
pub fn start_counting() -> isize {
    MOST.set(TAKEN.get());
    TAKEN.get()
}

/// The most that was taken at once since then, beyond what was before.
pub fn most_since(before: isize) -> usize {
    usize::try_from(MOST.get() - before).unwrap_or(0)
}

fn count(change: isize) {
    let taken = TAKEN.get() + change;
    TAKEN.set(taken);
    MOST.set(MOST.get().max(taken));
}

// SAFETY: the system's allocator does all the work.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size() as isize);
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        count(-(layout.size() as isize));
        unsafe { System.dealloc(pointer, layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count(layout.size() as isize);
        unsafe { System.alloc_zeroed(layout) }
    }

    /// Both places are there for a moment.
    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        count(size as isize);
        count(-(layout.size() as isize));
        unsafe { System.realloc(pointer, layout, size) }
    }
}
