/* TDPBF16PS in Bochs' arithmetic (softfloat), for traps.c: the loop of its cpu/avx/amx.cc over tiles of 16 x 64 bytes.
 * See README.md.
 */
#include <stdint.h>

#include "softfloat.h"

static uint32_t widened(uint16_t bits) { return (uint32_t)bits << 16; }

extern "C" void bochs_dot_bf16(uint32_t c[16][16], const uint16_t a[16][32], const uint16_t b[16][32])
{
    softfloat_status_t status;
    status.softfloat_roundingMode = softfloat_round_near_even;
    status.softfloat_exceptionFlags = 0;
    status.softfloat_exceptionMasks = softfloat_all_exceptions_mask;
    status.softfloat_suppressException = softfloat_all_exceptions_mask;
    status.softfloat_flush_underflow_to_zero = true;
    status.softfloat_denormals_are_zeros = true;
    status.extF80_roundingPrecision = 0;
    for (int m = 0; m < 16; m++) {
        float32 sums[32] = {0};
        for (int k = 0; k < 16; k++)
            for (int n = 0; n < 16; n++)
                for (int i = 0; i < 2; i++)
                    sums[2 * n + i] =
                        f32_mulAdd(widened(a[m][2 * k + i]), widened(b[k][2 * n + i]), sums[2 * n + i], 0, &status);
        for (int n = 0; n < 16; n++) {
            float32 pair = f32_add(sums[2 * n], sums[2 * n + 1], &status);
            c[m][n] = f32_add(c[m][n], pair, &status);
        }
    }
}
