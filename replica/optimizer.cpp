// The updates of replica/optimizer.py, in one pass over the vector: the dozen passes
// that NumPy makes take five times as long. Compiled by install.sh.
#include <cmath>

#ifdef __x86_64__
#include <xmmintrin.h>
#define FOR_EACH_CPU __attribute__((target_clones("avx512f", "avx2", "default")))

// The slots of weights without gradient, as those of a picture's margin, decay to
// denormal numbers, with which a core computes five times slower: zeros instead.
class FlushDenormals {
  const unsigned before = _mm_getcsr();

 public:
  FlushDenormals() { _mm_setcsr(before | 0x8040); }
  ~FlushDenormals() { _mm_setcsr(before); }
};
#else
#define FOR_EACH_CPU
struct FlushDenormals {
  FlushDenormals() {}
};
#endif

extern "C" {

FOR_EACH_CPU void adam(float *__restrict vector, const float *__restrict gradient,
                       float *__restrict mean, float *__restrict variance, long size,
                       float rate, float one_less_beta1, float one_less_beta2,
                       float epsilon) {
  FlushDenormals flush;
  for (long i = 0; i < size; i++) {
    mean[i] += (gradient[i] - mean[i]) * one_less_beta1;
    variance[i] += (gradient[i] * gradient[i] - variance[i]) * one_less_beta2;
    vector[i] -= mean[i] / (std::sqrt(variance[i]) + epsilon) * rate;
  }
}

FOR_EACH_CPU void momentum(float *__restrict vector, const float *__restrict gradient,
                           float *__restrict velocity, long size, float rate,
                           float momentum) {
  FlushDenormals flush;
  for (long i = 0; i < size; i++) {
    velocity[i] = velocity[i] * momentum + gradient[i];
    vector[i] -= velocity[i] * rate;
  }
}

FOR_EACH_CPU void sgd(float *__restrict vector, const float *__restrict gradient,
                      long size, float rate) {
  FlushDenormals flush;
  for (long i = 0; i < size; i++) vector[i] -= gradient[i] * rate;
}
}
