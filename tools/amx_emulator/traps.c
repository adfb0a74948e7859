/* AMX on a CPU without it: tile instructions trap as illegal ones (SIGILL) and are computed here, by the text of
 * Intel's manual (SDM volume 2, TDPBSUD and its neighbours). To be preloaded; see README.md.
 *
 *     cc -O3 -march=native -ffp-contract=off -shared -fPIC -o traps.so traps.c
 *
 * With -DBOCHS and bochs_dot.cc the arithmetic of TDPBF16PS is that of Bochs.
 *
 * A thread has eight tiles. They must have a shape that kernels give them, 16 rows of 64 bytes, or left and right tiles
 * with a quarter of k, 16 rows of 16 bytes and 4 rows of 64: anything else ends the process. Linux's permission (arch_prctl) is granted, and a process that uses tiles without having asked
 * for it, or a thread that has not configured them, ends, too.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <immintrin.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <ucontext.h>
#include <unistd.h>

typedef union {
    uint8_t bytes[16][64];
    uint16_t halves[16][32];
    int32_t dwords[16][16];
    float floats[16][16];
} tile_t;

static __thread tile_t tiles[8];
static __thread int is_configured, rows[8], widths[8];
static volatile int is_permitted;
static struct { long loads, stores, dots; } counts;

static void give_up(const char *why, const uint8_t *at)
{
    char line[160];
    int size = snprintf(line, sizeof line, "amx_emulator: %s: %02x %02x %02x %02x %02x %02x\n", why, at[0], at[1],
                        at[2], at[3], at[4], at[5]);
    if (write(2, line, size) < 0) _exit(4);
    _exit(3);
}

/* General-purpose registers by their number in an instruction. */
static const int REGISTERS[16] = {REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP, REG_RSI, REG_RDI,
                                  REG_R8,  REG_R9,  REG_R10, REG_R11, REG_R12, REG_R13, REG_R14, REG_R15};

typedef struct { uint8_t *base; int64_t stride; int length; } memory_t;

/* The memory operand whose ModRM byte is at `at`; x and b are the VEX prefix's extensions of its registers. The
 * index of a SIB byte is a stride; `next` is where RIP counts from. */
static memory_t decode(const uint8_t *at, int x, int b, const greg_t *regs)
{
    int mod = at[0] >> 6, rm = at[0] & 7, length = 1;
    memory_t found = {0, 0, 0};
    int64_t base = 0;
    if (rm == 4) {
        int scale = at[1] >> 6, index = (at[1] >> 3 & 7) | x << 3, low = at[1] & 7;
        length = 2;
        if (index != 4) found.stride = regs[REGISTERS[index]] << scale;
        if (low == 5 && mod == 0) {
            int32_t far;
            memcpy(&far, at + length, 4);
            base = far;
            length += 4;
        } else
            base = regs[REGISTERS[low | b << 3]];
    } else if (rm == 5 && mod == 0) {
        int32_t far;
        memcpy(&far, at + length, 4);
        length += 4;
        base = (int64_t)(at + length) + far;
    } else
        base = regs[REGISTERS[rm | b << 3]];
    if (mod == 1) base += (int8_t)at[length++];
    if (mod == 2) {
        int32_t far;
        memcpy(&far, at + length, 4);
        base += far;
        length += 4;
    }
    found.base = (uint8_t *)base;
    found.length = length;
    return found;
}

static void configure(const uint8_t *at, const uint8_t *instruction)
{
    uint8_t expected[64] = {1};
    int depth = at[24];
    for (int i = 0; i < 8; i++) {
        expected[16 + 2 * i] = widths[i] = i == 4 || i == 5 ? depth : 64;
        expected[48 + i] = rows[i] = i < 6 ? 16 : depth / 4;
    }
    if (memcmp(at, expected, 64) || (depth != 64 && depth != 16))
        give_up("another shape of tiles than kernels use", instruction);
    memset(tiles, 0, sizeof tiles);
    is_configured = 1;
}

static void dot_bytes(tile_t *c, const tile_t *a, const tile_t *b, int is_a_signed, int is_b_signed)
{
    for (int m = 0; m < 16; m++)
        for (int k = 0; k < 16; k++)
            for (int n = 0; n < 16; n++) {
                uint32_t sum = c->dwords[m][n];
                for (int i = 0; i < 4; i++) {
                    int x = a->bytes[m][4 * k + i], w = b->bytes[k][4 * n + i];
                    sum += (uint32_t)((is_a_signed ? (int8_t)x : x) * (is_b_signed ? (int8_t)w : w));
                }
                c->dwords[m][n] = (int32_t)sum;
            }
}

#ifdef BOCHS
void bochs_dot_bf16(uint32_t c[16][16], const uint16_t a[16][32], const uint16_t b[16][32]);

static void dot_bf16(tile_t *c, const tile_t *a, const tile_t *b)
{
    bochs_dot_bf16((uint32_t(*)[16])c->dwords, a->halves, b->halves);
}
#else
static float widened(uint16_t bits)
{
    uint32_t wide = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &wide, 4);
    return value;
}

/* Fused multiply-adds, to the nearest, denormals flushed. The sum of a pair is added to the tile at the end. */
static void dot_bf16(tile_t *c, const tile_t *a, const tile_t *b)
{
    _mm_setcsr((_mm_getcsr() & ~0x6000u) | 0x8040u);
    for (int m = 0; m < 16; m++) {
        float chains[2][16] = {{0}};
        for (int k = 0; k < 16; k++)
            for (int i = 0; i < 2; i++)
                for (int n = 0; n < 16; n++)
                    chains[i][n] =
                        __builtin_fmaf(widened(a->halves[m][2 * k + i]), widened(b->halves[k][2 * n + i]), chains[i][n]);
        for (int n = 0; n < 16; n++) c->floats[m][n] += chains[0][n] + chains[1][n];
    }
}
#endif

static void on_trap(int number, siginfo_t *info, void *context)
{
    greg_t *regs = ((ucontext_t *)context)->uc_mcontext.gregs;
    const uint8_t *at = (const uint8_t *)regs[REG_RIP];
    (void)number, (void)info;
    if (at[0] != 0xC4 || (at[1] & 31) != 2 || (at[2] & 0x84)) give_up("not an AMX instruction", at);
    int x = !(at[1] & 0x40), b = !(at[1] & 0x20), third = ~(at[2] >> 3) & 15, prefix = at[2] & 3, opcode = at[3];
    int is_register = at[4] >> 6 == 3, reg = at[4] >> 3 & 7, rm = at[4] & 7, length = 5;
    if (!is_permitted) give_up("tiles without permission", at);
    if (!is_configured && !(opcode == 0x49 && !is_register)) give_up("tiles that are not configured", at);
    if (opcode == 0x49 && !is_register && prefix == 0) {
        memory_t from = decode(at + 4, x, b, regs);
        configure(from.base, at);
        length = 4 + from.length;
    } else if (opcode == 0x49 && is_register && prefix == 0)
        is_configured = 0;
    else if (opcode == 0x49 && is_register && prefix == 3)
        memset(&tiles[reg], 0, sizeof tiles[reg]);
    else if (opcode == 0x4B && !is_register && (prefix == 3 || prefix == 2)) {
        memory_t place = decode(at + 4, x, b, regs);
        if (prefix == 3) memset(&tiles[reg], 0, sizeof tiles[reg]);
        for (int row = 0; row < rows[reg]; row++) {
            uint8_t *bytes = place.base + row * place.stride;
            if (prefix == 3)
                memcpy(tiles[reg].bytes[row], bytes, widths[reg]);
            else
                memcpy(bytes, tiles[reg].bytes[row], widths[reg]);
        }
        __atomic_add_fetch(prefix == 3 ? &counts.loads : &counts.stores, 1, __ATOMIC_RELAXED);
        length = 4 + place.length;
    } else if (is_register && (opcode == 0x5E || (opcode == 0x5C && prefix == 2))) {
        if (reg == rm || reg == third || rm == third || third > 7) give_up("tiles that are not three", at);
        if (widths[rm] != 4 * rows[third]) give_up("tiles that do not fit together", at);
        if (opcode == 0x5C)
            dot_bf16(&tiles[reg], &tiles[rm], &tiles[third]);
        else
            dot_bytes(&tiles[reg], &tiles[rm], &tiles[third], prefix >= 2, prefix & 1);
        __atomic_add_fetch(&counts.dots, 1, __ATOMIC_RELAXED);
    } else
        give_up("unknown AMX instruction", at);
    regs[REG_RIP] += length;
}

/* Stands before libc's: grants what Linux would on a CPU with AMX. */
long syscall(long number, ...)
{
    va_list list;
    va_start(list, number);
    long a = va_arg(list, long), b = va_arg(list, long), c = va_arg(list, long);
    register long d __asm__("r10") = va_arg(list, long);
    register long e __asm__("r8") = va_arg(list, long);
    register long f __asm__("r9") = va_arg(list, long);
    va_end(list);
    if (number == SYS_arch_prctl && a == 0x1023 && b == 18) {
        is_permitted = 1;
        return 0;
    }
    long result;
    __asm__ volatile("syscall" : "=a"(result) : "a"(number), "D"(a), "S"(b), "d"(c), "r"(d), "r"(e), "r"(f)
                     : "rcx", "r11", "memory");
    if (result < 0 && result > -4096) {
        errno = (int)-result;
        return -1;
    }
    return result;
}

__attribute__((constructor)) static void install(void)
{
    struct sigaction action;
    memset(&action, 0, sizeof action);
    action.sa_sigaction = on_trap;
    action.sa_flags = SA_SIGINFO | SA_NODEFER;
    sigaction(SIGILL, &action, NULL);
}

__attribute__((destructor)) static void report(void)
{
    if (getenv("AMX_EMULATOR_COUNTS"))
        fprintf(stderr, "amx_emulator: %ld tile loads, %ld stores, %ld products\n", counts.loads, counts.stores,
                counts.dots);
}
