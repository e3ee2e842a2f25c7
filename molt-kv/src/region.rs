//! Memory of our own: anonymous mappings and mapped files, charged to the books. Dropping one unmaps it, so what is
//! given back really leaves the resident set (a freed heap block may not).

use std::fs::File;
use std::ops::Range;
use std::os::fd::AsRawFd as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use bytemuck::Pod;
use memmap2::{Mmap, MmapMut};
use parking_lot::Mutex;

use crate::faults::{Boundary, pass};
use crate::ledger::{Kind, Ledger};
use crate::stop::StopFlag;

/// Why memory could not be had.
#[derive(Debug, thiserror::Error)]
pub enum RegionError {
    /// The system refused an anonymous mapping.
    #[error("the system gave no mapping of {bytes} bytes")]
    Anonymous {
        /// How much was asked for.
        bytes: usize,
        /// The system's reason.
        source: std::io::Error,
    },
    /// A file could not be opened or mapped.
    #[error("cannot map {}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// The system's reason.
        source: std::io::Error,
    },
}

/// From this size on a region has huge pages (2 MiB on most machines) of its own.
const HUGE: usize = 8 << 20;

/// An anonymous mapping of our own, zeroed, page-aligned.
#[derive(Debug)]
pub struct Region {
    map: MmapMut,
    charged: u64,
    kind: Kind,
    ledger: Ledger,
}

impl Region {
    /// Maps `bytes` and charges all of them.
    pub fn new(ledger: &Ledger, kind: Kind, bytes: usize) -> Result<Self, RegionError> {
        let mut region = Self::reserved(ledger, kind, bytes)?;
        region.set_charge(bytes);
        Ok(region)
    }

    /// Like [`Region::new`], in huge pages where it is big and the system has them: for what is filled at once and given
    /// back at once. Unmapping gigabytes takes a tenth of the time that it takes in small pages.
    pub fn huge(ledger: &Ledger, kind: Kind, bytes: usize) -> Result<Self, RegionError> {
        // Small neighbours would share a huge page, which stays whole while one of them is there.
        if bytes < HUGE {
            return Self::new(ledger, kind, bytes);
        }
        let mut region = Self::mapped(ledger, kind, bytes)?;
        // A system without huge pages refuses the advice, which is only slower.
        #[cfg(target_os = "linux")]
        let _refused = region.map.advise(memmap2::Advice::HugePage);
        region.set_charge(bytes);
        Ok(region)
    }

    /// Maps `bytes` without charging them: pages cost nothing until they are touched, and the owner says with
    /// [`Region::set_charge`] how much it uses.
    pub fn reserved(ledger: &Ledger, kind: Kind, bytes: usize) -> Result<Self, RegionError> {
        let region = Self::mapped(ledger, kind, bytes)?;
        // A huge page under the first token of every plane would make a small cache resident at many times its size. A
        // kernel without huge pages refuses the advice, which is as good.
        #[cfg(target_os = "linux")]
        let _refused = region.map.advise(memmap2::Advice::NoHugePage);
        Ok(region)
    }

    fn mapped(ledger: &Ledger, kind: Kind, bytes: usize) -> Result<Self, RegionError> {
        let map = pass(Boundary::MapMemory)
            .and_then(|()| MmapMut::map_anon(bytes.max(1)))
            .map_err(|source| RegionError::Anonymous { bytes, source })?;
        Ok(Self { map, charged: 0, kind, ledger: ledger.clone() })
    }

    /// Sets the bytes that the books hold for this region.
    pub fn set_charge(&mut self, bytes: usize) {
        let bytes = u64::try_from(bytes).unwrap_or(u64::MAX);
        if bytes > self.charged {
            self.ledger.charge(self.kind, bytes - self.charged);
        } else {
            self.ledger.give_back(self.kind, self.charged - bytes);
        }
        self.charged = bytes;
    }

    /// Gives the pages that lie wholly in `range` (bytes) back to the system; they read as zero afterwards.
    pub fn discard(&mut self, range: Range<usize>) {
        let page = page_size();
        let start = range.start.next_multiple_of(page);
        let end = range.end.min(self.map.len()) / page * page;
        if start >= end {
            return;
        }
        // SAFETY: the range lies inside this private anonymous mapping, to which `&mut self` holds the only
        // reference; after MADV_DONTNEED its pages read as zeroes, which is a valid value of every `Pod` type.
        let advised =
            unsafe { self.map.unchecked_advise_range(memmap2::UncheckedAdvice::DontNeed, start, end - start) };
        debug_assert!(advised.is_ok(), "{advised:?}");
    }

    /// The memory as plain values.
    pub fn as_slice<T: Pod>(&self) -> &[T] {
        let whole = self.map.len() / size_of::<T>() * size_of::<T>();
        bytemuck::cast_slice(&self.map[..whole])
    }

    /// The memory as plain values, to write.
    pub fn as_mut_slice<T: Pod>(&mut self) -> &mut [T] {
        let whole = self.map.len() / size_of::<T>() * size_of::<T>();
        bytemuck::cast_slice_mut(&mut self.map[..whole])
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        self.ledger.give_back(self.kind, self.charged);
    }
}

/// A file mapped read-only. Parts of it are charged as they are put to use, see [`FileRegion::part`].
#[derive(Debug)]
pub struct FileRegion {
    path: PathBuf,
    content: Content,
    parts: Mutex<Parts>,
}

/// Parts of a file that are held, and those that were since none was.
#[derive(Debug, Default)]
struct Parts {
    held: usize,
    gone: Vec<Range<usize>>,
}

impl Parts {
    /// Adds a part that is given back. Where it was the last one, returns all that were, joined: a huge page that reaches over
    /// the edge between two of them lies wholly in neither, and stayed when each was given back.
    fn give_back(&mut self, range: Range<usize>) -> Vec<Range<usize>> {
        /// What lies between two parts may be so long: paddings, and vectors that are read once.
        const GAP: usize = 1 << 20;
        /// So many are joined even while others are held.
        const MOST: usize = 1024;
        self.held = self.held.saturating_sub(1);
        self.gone.push(range);
        if self.held > 0 && self.gone.len() < MOST {
            return Vec::new();
        }
        self.gone.sort_by_key(|range| range.start);
        let mut joined: Vec<Range<usize>> = Vec::new();
        for range in self.gone.drain(..) {
            match joined.last_mut() {
                Some(last) if range.start <= last.end + GAP => last.end = last.end.max(range.end),
                _ => joined.push(range),
            }
        }
        if self.held > 0 {
            self.gone = joined;
            return Vec::new();
        }
        joined
    }
}

#[derive(Debug)]
enum Content {
    Mapped {
        file: File,
        map: Mmap,
    },
    /// Part of the program's own file, which the system maps and drops page by page like any other.
    Embedded(&'static [u8]),
}

impl FileRegion {
    /// Maps a whole file.
    pub fn open(path: &Path) -> Result<Arc<Self>, RegionError> {
        let error = |source| RegionError::File { path: path.to_owned(), source };
        let file = File::open(path).map_err(error)?;
        // SAFETY: the mapping is private and read-only. A file that somebody truncates under us would raise SIGBUS;
        // model files are written under another name and renamed, and the user is told not to edit them in place.
        let map = unsafe { Mmap::map(&file) }.map_err(error)?;
        // Where the file system has huge pages, they are read and given back in a twentieth of the time, and found in a
        // hundredth of the entries. A small file would be read whole for its header.
        #[cfg(target_os = "linux")]
        if map.len() >= HUGE {
            let _refused = map.advise(memmap2::Advice::HugePage);
        }
        Ok(Arc::new(Self { path: path.to_owned(), content: Content::Mapped { file, map }, parts: Mutex::default() }))
    }

    /// A file that is part of the program, under a name for messages.
    pub fn embedded(name: &str, bytes: &'static [u8]) -> Arc<Self> {
        Arc::new(Self { path: PathBuf::from(name), content: Content::Embedded(bytes), parts: Mutex::default() })
    }

    /// The file's path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The file's bytes.
    pub fn bytes(&self) -> &[u8] {
        match &self.content {
            Content::Mapped { map, .. } => map,
            Content::Embedded(bytes) => bytes,
        }
    }

    /// A part of the file, charged to the books while it is held; `None` where the file does not hold it.
    pub fn part(self: &Arc<Self>, ledger: &Ledger, kind: Kind, range: Range<usize>) -> Option<FilePart> {
        self.bytes().get(range.clone())?;
        let charged = u64::try_from(range.len()).unwrap_or(u64::MAX);
        ledger.charge_file(kind, charged);
        self.parts.lock().held += 1;
        Some(FilePart { file: self.clone(), range, charged, kind, ledger: ledger.clone() })
    }
}

impl FileRegion {
    /// Gives the pages that lie wholly in `range` back to the system: out of the resident set, and out of the page
    /// cache (which stays charged to our cgroup otherwise). They are read from the file again when they are touched.
    pub fn release(&self, range: Range<usize>) {
        let Some(pages) = self.forget(range) else { return };
        if let Content::Mapped { file, .. } = &self.content {
            let offset = |at: usize| libc::off_t::try_from(at).unwrap_or(0);
            let (from, length) = (offset(pages.start), offset(pages.len()));
            // SAFETY: plain system call on a descriptor that we own; advice cannot make memory invalid.
            unsafe { libc::posix_fadvise(file.as_raw_fd(), from, length, libc::POSIX_FADV_DONTNEED) };
        }
    }

    /// Has the system read what lies in `range` into its page cache, where it is not yet, until it is done or told to stop. A
    /// few MiB at a time are resident meanwhile, and nothing afterwards; nothing is charged: the pages are clean and the
    /// system's to drop. Takes as long as the reading.
    pub fn fetch(&self, range: Range<usize>, stop: &StopFlag) {
        // Touched and not only asked for: so they come in pages as large as those that a step would find.
        const AT_ONCE: usize = 8 << 20;
        let Some(bytes) = self.bytes().get(range.clone()) else { return };
        for (at, part) in bytes.chunks(AT_ONCE).enumerate() {
            if stop.is_up() {
                return;
            }
            let touched: u64 = part.iter().step_by(page_size()).chain(part.last()).map(|byte| u64::from(*byte)).sum();
            std::hint::black_box(touched);
            let start = range.start + at * AT_ONCE;
            self.forget(start..start + part.len());
        }
    }

    /// Takes the pages that lie wholly in `range` out of the resident set and leaves them in the page cache. Returns
    /// the bytes that these pages are.
    pub fn forget(&self, range: Range<usize>) -> Option<Range<usize>> {
        let bytes = self.bytes().get(range)?;
        let page = page_size();
        let start = bytes.as_ptr().addr().next_multiple_of(page);
        let end = bytes.as_ptr_range().end.addr() / page * page;
        if start >= end {
            return None;
        }
        let inner = &bytes[start - bytes.as_ptr().addr()..][..end - start];
        // SAFETY: these whole pages hold nothing but bytes of a private mapping that is backed by a file and never
        // written (a mapped model file, or constants of the program without relocations), so a dropped page comes back
        // with the same content; references into it stay valid.
        unsafe { libc::madvise(inner.as_ptr().cast_mut().cast(), inner.len(), libc::MADV_DONTNEED) };
        let from = start - self.bytes().as_ptr().addr();
        Some(from..from + inner.len())
    }
}

/// A charged part of a mapped file.
#[derive(Debug)]
pub struct FilePart {
    file: Arc<FileRegion>,
    range: Range<usize>,
    charged: u64,
    kind: Kind,
    ledger: Ledger,
}

impl FilePart {
    /// Its bytes.
    pub fn bytes(&self) -> &[u8] {
        &self.file.bytes()[self.range.clone()]
    }
}

impl Drop for FilePart {
    fn drop(&mut self) {
        self.file.release(self.range.clone());
        let joined = self.file.parts.lock().give_back(self.range.clone());
        joined.into_iter().for_each(|range| self.file.release(range));
        self.ledger.give_back_file(self.kind, self.charged);
    }
}

/// Has the heap give back what it keeps of freed blocks: the buffers of a carry or of a long read are large, and the
/// allocator holds on to them for each thread. Only glibc can be asked.
pub fn trim_heap() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    // SAFETY: a call without arguments in memory; it only returns pages of free blocks.
    unsafe {
        libc::malloc_trim(0);
    }
}

/// Bytes of the heap that are in use, large blocks with mappings of their own included. Only glibc says.
pub fn heap_in_use() -> Option<usize> {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    {
        // SAFETY: a call without arguments in memory; it only reads the allocator's counters.
        let heap = unsafe { libc::mallinfo2() };
        Some(heap.uordblks + heap.hblkhd)
    }
    #[cfg(not(all(target_os = "linux", target_env = "gnu")))]
    None
}

/// Bytes of a page.
pub fn page_size() -> usize {
    // SAFETY: plain system call without arguments in memory.
    let size = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    usize::try_from(size).unwrap_or(4096)
}

#[cfg(test)]
mod tests {
    use molt_scheduler::units::Bytes;

    use super::*;

    #[test]
    fn the_books_follow_what_is_mapped() {
        let ledger = Ledger::new();
        let mut region = Region::new(&ledger, Kind::Cache, 1 << 20).unwrap();
        assert_eq!(ledger.used(Kind::Cache).get(), 1 << 20);
        region.set_charge(10);
        assert_eq!(ledger.total().get(), 10);
        drop(region);
        assert_eq!(ledger.total().get(), 0);
    }

    #[test]
    fn discarded_pages_read_as_zero_and_the_rest_stays() {
        let ledger = Ledger::new();
        let page = page_size();
        let mut region = Region::new(&ledger, Kind::Cache, 4 * page).unwrap();
        region.as_mut_slice::<u8>().fill(7);
        region.discard(page + 1..4 * page);
        let bytes = region.as_slice::<u8>();
        assert!(bytes[..2 * page].iter().all(|b| *b == 7), "a page that is only partly in the range must stay");
        assert!(bytes[2 * page..].iter().all(|b| *b == 0));
    }

    /// Pages of a file's mapping that are in the page cache, whether this process has touched them or not.
    fn in_page_cache(file: &FileRegion) -> usize {
        let mut pages = vec![0u8; file.bytes().len().div_ceil(page_size())];
        // SAFETY: the range is that of a mapping which is alive, and the vector has a byte for each of its pages.
        let asked =
            unsafe { libc::mincore(file.bytes().as_ptr().cast_mut().cast(), file.bytes().len(), pages.as_mut_ptr()) };
        assert_eq!(asked, 0, "{}", std::io::Error::last_os_error());
        pages.iter().filter(|page| **page & 1 == 1).count()
    }

    #[test]
    fn parts_that_went_are_joined_once_none_is_held() {
        let mut parts = Parts { held: 4, gone: Vec::new() };
        const FAR: usize = 9 << 20;
        assert_eq!(parts.give_back(100..200), []);
        assert_eq!(parts.give_back(FAR..FAR + 7), []);
        assert_eq!(parts.give_back(0..90), []);
        let (near, far) = (0..300, FAR..FAR + 7);
        assert_eq!(parts.give_back(210..300), [near, far]);
        assert!(parts.gone.is_empty());
        // One that stays for ever does not make the list of those that come and go grow for ever.
        parts.held = 10_000;
        for _ in 0..5_000 {
            assert_eq!(parts.give_back(5..6), []);
        }
        assert!(parts.gone.len() < 1_024);
    }

    /// A file of sevens on a disk; pages of a memory file system would stay whatever is asked.
    fn on_disk(length: usize) -> Option<(tempfile::NamedTempFile, Arc<FileRegion>)> {
        let Ok(mut file) = tempfile::NamedTempFile::new_in("/var/tmp") else {
            println!("not checked: no files in /var/tmp");
            return None;
        };
        std::io::Write::write_all(&mut file, &vec![7; length]).unwrap();
        file.as_file().sync_all().unwrap();
        let region = FileRegion::open(file.path()).unwrap();
        region.release(0..length);
        assert_eq!(in_page_cache(&region), 0);
        Some((file, region))
    }

    /// What stays in the page cache stays charged to the control group: leaving the resident set alone is not enough.
    #[test]
    fn parts_of_a_file_that_are_given_back_leave_the_page_cache() {
        let check = |length: usize, edges: &[usize]| {
            let Some((_file, region)) = on_disk(length) else { return };
            let ledger = Ledger::new();
            let ends = edges.iter().copied().chain([length]);
            let ranges = [0].iter().chain(edges).copied().zip(ends).map(|(start, end)| start..end);
            let mut parts: Vec<_> = ranges.map(|range| region.part(&ledger, Kind::Weights, range).unwrap()).collect();
            assert!(parts.iter().all(|part| part.bytes().iter().all(|byte| *byte == 7)));
            let all = Bytes::from(length);
            assert_eq!((in_page_cache(&region), ledger.files(), ledger.total()), (length / page_size(), all, all));
            while parts.pop().is_some() {}
            assert_eq!((in_page_cache(&region), ledger.files(), ledger.total()), (0, Bytes::ZERO, Bytes::ZERO));
            assert!(region.bytes().iter().all(|byte| *byte == 7), "it is read from the file again");
        };
        check(64 * page_size(), &[]);
        check(64 * page_size(), &[5, 9 * page_size()]);
        // Where the file system has huge pages, one lies over each of these edges and wholly in no part.
        check(2 * HUGE, &[(1 << 20) + 5, HUGE + (3 << 20) + 5]);
    }

    #[test]
    fn what_is_fetched_is_in_the_page_cache_and_in_no_books() {
        const PAGES: usize = 64;
        let Some((_file, region)) = on_disk(PAGES * page_size()) else { return };
        let (go_on, stop) = (StopFlag::new(), StopFlag::new());
        stop.raise();
        region.fetch(0..PAGES * page_size(), &stop);
        assert_eq!(in_page_cache(&region), 0);
        let check = |range: Range<usize>, least: usize| {
            region.fetch(range, &go_on);
            assert!(in_page_cache(&region) >= least, "{} of {least} pages", in_page_cache(&region));
        };
        check(page_size() + 5..3 * page_size(), 2);
        check(0..PAGES * page_size(), PAGES);
        region.fetch(0..PAGES * page_size() + 1, &go_on);
        region.fetch(7..7, &go_on);
    }

    #[test]
    fn a_missing_file_is_named() {
        let error = FileRegion::open(Path::new("/nowhere/model.gguf")).unwrap_err().to_string();
        assert!(error.contains("/nowhere/model.gguf"), "{error}");
    }
}
