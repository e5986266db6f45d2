// Few vectors times a matrix (kernels/products.h). TOKENS, vectors that are multiplied at once, is defined by a specialisation.

extern "C" void linear(const Product* call) { product<TOKENS>(*call); }
