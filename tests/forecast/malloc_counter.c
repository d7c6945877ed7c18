/* Counts the bytes that malloc has handed out to this process, and their peak: what a program really takes, below PyTorch.

   $ cc -O2 -shared -fPIC -o malloc_counter.so tests/forecast/malloc_counter.c
   $ LD_PRELOAD=$PWD/malloc_counter.so python ...

   Blocks below 1 KiB are not counted: they are Python's objects and nodes of autograd. Needs glibc. */

#include <errno.h>
#include <malloc.h>
#include <stdatomic.h>
#include <stddef.h>

enum { SMALLEST = 1024 };

extern void *__libc_malloc(size_t size);
extern void *__libc_calloc(size_t count, size_t size);
extern void *__libc_realloc(void *block, size_t size);
extern void *__libc_memalign(size_t alignment, size_t size);
extern void __libc_free(void *block);

static atomic_llong now, peak; /* bytes */

long long malloc_counter_now(void) { return now; }
long long malloc_counter_peak(void) { return peak; }
void malloc_counter_reset_peak(void) { peak = now; }

static long long counted(void *block) {
    size_t size = malloc_usable_size(block); /* 0 for NULL */
    return size < SMALLEST ? 0 : (long long)size;
}

static void *add(void *block) {
    long long size = counted(block), total = atomic_fetch_add(&now, size) + size, before = peak;
    while (before < total && !atomic_compare_exchange_weak(&peak, &before, total)) { }
    return block;
}

void *malloc(size_t size) { return add(__libc_malloc(size)); }
void *calloc(size_t count, size_t size) { return add(__libc_calloc(count, size)); }
void *memalign(size_t alignment, size_t size) { return add(__libc_memalign(alignment, size)); }
void *aligned_alloc(size_t alignment, size_t size) { return add(__libc_memalign(alignment, size)); }

int posix_memalign(void **result, size_t alignment, size_t size) { /* PyTorch's tensors on the CPU */
    void *block = __libc_memalign(alignment, size);
    if (!block)
        return ENOMEM;
    *result = add(block);
    return 0;
}

void *realloc(void *block, size_t size) {
    long long before = counted(block);
    void *result = __libc_realloc(block, size);
    if (result || !size) { /* otherwise the old block remains */
        now -= before;
        add(result);
    }
    return result;
}

void free(void *block) {
    now -= counted(block);
    __libc_free(block);
}
