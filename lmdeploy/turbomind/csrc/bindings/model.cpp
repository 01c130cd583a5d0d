// Python's view of the model: shapes and limits in, packed weights in, one call per step.
//
// Checks every array once; behind this file nothing is checked again.
#include "model.h"

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <functional>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "image.h"
#include "kernels/dispatch.h"
#include "philox.h"

namespace nb = nanobind;
using namespace lmdeploy;

namespace {

template <class T>
using Vector = nb::ndarray<T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
template <class T>
using Table = nb::ndarray<T, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

void require(bool condition, const char* what) {
  if (!condition) throw std::invalid_argument(what);
}

// Entries of a tuple of arrays, in order, without ever copying one.
class Columns {
 public:
  explicit Columns(const nb::tuple& columns) : columns_(columns) {}

  template <class T>
  Vector<T> next() {
    return nb::cast<Vector<T>>(columns_[index_++], false);
  }
  // One that must have `count` entries.
  template <class T>
  T* next(size_t count) {
    Vector<T> column = next<T>();
    require(column.shape(0) == count, "the columns of a batch differ in length");
    return column.data();
  }
  template <class T>
  Table<T> next_table() {
    return nb::cast<Table<T>>(columns_[index_++], false);
  }

 private:
  nb::tuple columns_;
  int index_ = 0;
};

SampleColumns read_samples(Columns in, BatchLengths& lengths) {
  SampleColumns s{};
  Vector<const int32_t> index = in.next<const int32_t>();
  size_t count = index.shape(0);
  s.count = static_cast<int>(count);
  s.token_index = index.data();
  s.target_ids = in.next<const int32_t>(count);
  s.temperature = in.next<const float>(count);
  s.top_k = in.next<const int32_t>(count);
  s.top_p = in.next<const float>(count);
  s.min_p = in.next<const float>(count);
  s.repetition_penalty = in.next<const float>(count);
  s.presence_penalty = in.next<const float>(count);
  s.frequency_penalty = in.next<const float>(count);
  s.seed = in.next<const uint64_t>(count);
  s.position = in.next<const int64_t>(count);
  s.logprobs = in.next<const int32_t>(count);
  s.bias_start = in.next<const int32_t>(count + 1);
  Vector<const int32_t> bias_ids = in.next<const int32_t>();
  s.bias_ids = bias_ids.data();
  lengths.bias_ids = bias_ids.shape(0);
  s.bias_values = in.next<const float>(lengths.bias_ids);
  s.history_start = in.next<const int32_t>(count + 1);
  Vector<const int32_t> history_ids = in.next<const int32_t>();
  s.history_ids = history_ids.data();
  lengths.history_ids = history_ids.shape(0);
  s.history_counts = in.next<const int32_t>(lengths.history_ids);
  return s;
}

// Whose masks are written while the step runs: (index, bits, wait).
void read_masks(Columns in, int vocab, SampleColumns& samples, BatchLengths& lengths) {
  samples.mask_index = in.next<const int32_t>(samples.count);
  Table<const uint32_t> bits = in.next_table<const uint32_t>();
  require(bits.shape(1) == mask_words(vocab), "a mask needs one bit for each token");
  samples.mask_bits = bits.data();
  lengths.mask_rows = bits.shape(0);
}

Batch read_batch(Columns in, BatchLengths& lengths) {
  Batch b{};
  Vector<const int32_t> tokens = in.next<const int32_t>(), rows = in.next<const int32_t>();
  Vector<const int32_t> context = in.next<const int32_t>(), starts = in.next<const int32_t>();
  Vector<const int32_t> blocks = in.next<const int32_t>();
  lengths.token_ids = tokens.shape(0);
  lengths.row_start = rows.shape(0);
  lengths.context_len = context.shape(0);
  lengths.block_start = starts.shape(0);
  lengths.block_ids = blocks.shape(0);
  b.tokens = static_cast<int>(lengths.token_ids);
  b.rows = static_cast<int>(lengths.context_len);
  b.token_ids = tokens.data();
  b.row_start = rows.data();
  b.context_len = context.data();
  b.block_start = starts.data();
  b.block_ids = blocks.data();
  return b;
}

// Throws unless every array that the step writes has room for it.
StepOutput read_output(Columns out, size_t samples) {
  StepOutput o{};
  o.token_ids = out.next<int32_t>(samples);
  o.finite = out.next<bool>(samples);
  o.logprob = out.next<float>(samples);
  Table<int32_t> ids = out.next_table<int32_t>();
  Table<float> values = out.next_table<float>();
  require(ids.shape(0) == samples && values.shape(0) == samples && ids.shape(1) == values.shape(1),
          "top_ids and top_logprobs must have one row per sample and equal shapes");
  o.top = static_cast<int>(ids.shape(1));
  o.top_ids = ids.data();
  o.top_logprobs = values.data();
  return o;
}

void step(Model& model, const nb::tuple& batch_columns, const nb::tuple& sample_columns,
          const nb::tuple& output_columns, const nb::dict& logits, const std::optional<nb::tuple>& masks) {
  BatchLengths lengths{};
  Batch batch = read_batch(Columns(batch_columns), lengths);
  batch.samples = read_samples(Columns(sample_columns), lengths);
  std::function<void()> wait;
  if (masks) {
    read_masks(Columns(*masks), model.shape().vocab, batch.samples, lengths);
    nb::handle ready = (*masks)[2].ptr();
    wait = [ready] {  // on a thread of the step, which Python knows nothing of
      nb::gil_scoped_acquire python;
      try {
        ready();
      } catch (nb::python_error& error) {
        error.discard_as_unraisable("masks of a step");
      }
    };
    batch.wait_for_masks = &wait;
  }
  check_batch(batch, lengths, model.shape(), model.limits());
  StepOutput output = read_output(Columns(output_columns), batch.samples.count);
  std::vector<float*> rows(batch.samples.count, nullptr);
  for (auto [sample, array] : logits) {
    auto row = nb::cast<Vector<float>>(array, false);
    require(row.shape(0) == size_t(model.shape().vocab), "a row for logits must be as long as the vocabulary");
    rows.at(nb::cast<size_t>(sample)) = row.data();
  }
  output.logits = rows.data();
  nb::gil_scoped_release release;
  model.step(batch, output);
}

// Of the last step: for each thread, for each operation, (name, seconds, laps).
nb::list profile(const Model& model) {
  nb::list threads;
  for (const OpTimes& times : model.profile()) {
    nb::list ops;
    for (int op = 0; op < kOps; ++op) ops.append(nb::make_tuple(kOpNames[op], times[op].seconds, times[op].laps));
    threads.append(ops);
  }
  return threads;
}

// Read-only arrays too: views of a mapped file.
using Codes = nb::ndarray<nb::ro, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

void pack(Model& model, int matrix, int kind, int group, const Codes& codes, const nb::tuple& parameters, int dst_row,
          int run) {
  PackSource source{};
  source.kind = static_cast<WeightKind>(kind);
  source.n = static_cast<int>(codes.shape(0));
  source.k = static_cast<int>(codes.shape(1));
  source.group = group;
  source.codes = codes.data();
  require(codes.itemsize() == (is_dense(source.kind) ? 2 : 1), "codes have the wrong type for this kind of weight");
  if (!is_dense(source.kind)) {
    size_t entries = size_t(source.n) * ((source.k + group - 1) / group);
    Columns in(parameters);
    source.scales = in.next<const uint16_t>(entries);
    if (kind == kW4Zero) source.zeros = in.next<const uint8_t>(entries);
    if (kind == kW4Min || kind == kInt8Min) source.mins = in.next<const uint16_t>(entries);
  }
  nb::gil_scoped_release release;
  model.weights().pack(matrix, source, dst_row, run, model.pool());
}

using Optional16 = std::optional<Vector<const uint16_t>>;
using Optional8 = std::optional<Vector<const uint8_t>>;

// `data`: rows of a file as bytes, or words of it; a view with any distance between its rows.
uint32_t pack_file(Model& model, int matrix, int form, int k, int group,
                   const nb::ndarray<nb::ro, nb::ndim<2>, nb::device::cpu>& data,
                   const std::optional<Vector<const int32_t>>& rows, const Optional16& scales, const Optional8& zeros,
                   int dst_row, int run) {
  require(form >= 0 && form < kSourceForms && k > 0 && group >= 0, "no such form of source");
  FileMatrix source{};
  source.form = static_cast<SourceForm>(form);
  source.k = k;
  source.group = group;
  source.data = static_cast<const uint8_t*>(data.data());
  source.stride = size_t(data.stride(0)) * data.itemsize();
  require(data.shape(1) == 1 || data.stride(1) == 1, "a row of the source must be in one piece");
  if (by_inputs(source.form)) {
    int words = source.form == kInputsAwq ? 8 : 1, inputs = source.form == kInputsAwq     ? 1
                                                            : source.form == kInputsGptq4 ? 8
                                                                                          : 4;
    require(data.itemsize() == 4 && !rows && int64_t(data.shape(0)) * inputs == k, "words for other inputs");
    source.n = static_cast<int>(data.shape(1)) * words;
  } else {
    require(data.itemsize() == 1 && data.shape(1) == row_bytes(source.form, k), "rows for other inputs");
    source.n = static_cast<int>(rows ? rows->shape(0) : data.shape(0));
    if (rows) source.rows = rows->data();
    for (int i = 0; rows && i < source.n; ++i) {
      require(source.rows[i] >= 0 && size_t(source.rows[i]) < data.shape(0), "a row that the source does not have");
    }
  }
  bool grouped =
      source.form == kRowsWords4 || source.form == kRowsWords8 || source.form == kRowsInt8 || by_inputs(source.form);
  bool zeroed = grouped && packed_kind(source.form) == kW4Zero;
  require(grouped == scales.has_value() && zeroed == zeros.has_value(), "scales or zeros are missing or too many");
  bool dense = packed_kind(source.form) == kBf16 || packed_kind(source.form) == kFp16;
  require(dense || group > 0, "a group size is needed");
  if (grouped) {
    size_t entries = size_t(source.n) * ((k + group - 1) / group);
    require(scales->shape(0) == entries && (!zeros || zeros->shape(0) == entries), "one scale per group is needed");
    source.scales = scales->data();
    if (zeros) source.zeros = zeros->data();
  }
  nb::gil_scoped_release release;
  return model.weights().pack_file(matrix, source, dst_row, run, model.pool());
}

using Bytes = nb::ndarray<nb::numpy, const uint8_t, nb::ndim<1>, nb::c_contig>;

// The packed weights placed so far; a view that keeps the model alive.
Bytes weight_bytes(Model& model) {
  Weights& weights = model.weights();
  return Bytes(weights.data(), {weights.used()}, nb::find(model));
}

int64_t fill_weights(Model& model, int fd, size_t bytes, size_t piece, const Vector<const uint64_t>& sums) {
  require(bytes <= model.weights().size(), "the file is larger than the memory for weights");
  require(piece > 0 && sums.shape(0) == (bytes + piece - 1) / piece, "one checksum per piece is needed");
  nb::gil_scoped_release release;
  return read_image(fd, model.weights().data(), bytes, piece, sums.data(), model.pool());
}

void bind_images(nb::module_& m) {
  m.def("checksum", [](const nb::ndarray<nb::ro, const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>& data) {
    nb::gil_scoped_release release;
    return checksum(data.data(), data.shape(0));
  });
  m.def("layout_fingerprint", &layout_fingerprint);
}

void bind_shapes(nb::module_& m) {
  nb::class_<InputFormat>(m, "InputFormat")
      .def("__init__", [](InputFormat* self, int k, int group, int bf16, bool f32, float threshold) {
        new (self) InputFormat{k, group, bf16, f32, threshold};
      });
  nb::class_<LayerShape>(m, "LayerShape")
      .def(nb::init<>())
      .def_rw("heads", &LayerShape::heads)
      .def_rw("kv_heads", &LayerShape::kv_heads)
      .def_rw("head_dim", &LayerShape::head_dim)
      .def_rw("rotary_dim", &LayerShape::rotary_dim)
      .def_rw("rope", &LayerShape::rope)
      .def_rw("window", &LayerShape::window)
      .def_rw("scale", &LayerShape::scale)
      .def_rw("softcap", &LayerShape::softcap)
      .def_rw("qk_norm", &LayerShape::qk_norm)
      .def_rw("qk_norm_across", &LayerShape::qk_norm_across)
      .def_rw("pre_norm", &LayerShape::pre_norm)
      .def_rw("post_norm", &LayerShape::post_norm)
      .def_rw("residual_scale", &LayerShape::residual_scale)
      .def_rw("intermediate", &LayerShape::intermediate)
      .def_rw("activation", &LayerShape::activation)
      .def_rw("qkv_input", &LayerShape::qkv_input)
      .def_rw("o_input", &LayerShape::o_input)
      .def_rw("gate_up_input", &LayerShape::gate_up_input)
      .def_rw("down_input", &LayerShape::down_input);
  nb::class_<ModelShape>(m, "ModelShape")
      .def(nb::init<>())
      .def_rw("hidden", &ModelShape::hidden)
      .def_rw("vocab", &ModelShape::vocab)
      .def_rw("norm_eps", &ModelShape::norm_eps)
      .def_rw("norm_offset", &ModelShape::norm_offset)
      .def_rw("embedding_scale", &ModelShape::embedding_scale)
      .def_rw("logit_scale", &ModelShape::logit_scale)
      .def_rw("logit_softcap", &ModelShape::logit_softcap)
      .def_rw("head_input", &ModelShape::head_input)
      .def_rw("layers", &ModelShape::layers)
      .def_rw("rope", &ModelShape::rope)
      .def_rw("rope_scale", &ModelShape::rope_scale);
  nb::class_<Limits>(m, "Limits")
      .def(nb::init<>())
      .def_rw("max_step_tokens", &Limits::max_step_tokens)
      .def_rw("max_rows", &Limits::max_rows)
      .def_rw("max_context", &Limits::max_context)
      .def_rw("block_size", &Limits::block_size)
      .def_rw("num_blocks", &Limits::num_blocks)
      .def_rw("threads", &Limits::threads)
      .def_rw("kv_bits", &Limits::kv_bits);
}

}  // namespace

void register_model(nb::module_& m) {
  bind_shapes(m);
  bind_images(m);
  nb::class_<Model>(m, "Model")
      .def("__init__",
           [](Model* self, const ModelShape& shape, const Limits& limits, const std::vector<int>& cpus,
              size_t weight_bytes) {
             require(limits.threads == static_cast<int>(cpus.size()), "one cpu per thread is needed");
             require(shape.rope.size() == shape.rope_scale.size(), "one scale per rotary embedding is needed");
             nb::gil_scoped_release release;  // taking gigabytes lasts seconds, in which others may tell so
             new (self) Model(shape, limits, cpus, weight_bytes, kernels());
           })
      .def("add_matrix",
           [](Model& self, int kind, int n, int k, int group) {
             return self.weights().add_matrix(static_cast<WeightKind>(kind), n, k, group);
           })
      .def("pack", pack)
      .def("pack_file", pack_file, nb::arg("matrix"), nb::arg("form"), nb::arg("k"), nb::arg("group"), nb::arg("data"),
           nb::arg("rows").none(), nb::arg("scales").none(), nb::arg("zeros").none(), nb::arg("dst_row"),
           nb::arg("run"))
      .def("add_vector",
           [](Model& self, const Vector<const float>& values) {
             return self.weights().add_vector(values.data(), values.shape(0));
           })
      .def("place_vector", [](Model& self, size_t count) { return self.weights().add_vector(nullptr, count); })
      .def("place_order", [](Model& self, int layer, const std::string& role,
                             size_t count) { self.weights().set_order(layer, role, nullptr, count); })
      .def("image", weight_bytes)
      .def("read_image", fill_weights)
      .def("set_order",
           [](Model& self, int layer, const std::string& role, const Vector<const int32_t>& order) {
             self.weights().set_order(layer, role, order.data(), order.shape(0));
           })
      .def("set_linear", [](Model& self, int layer, const std::string& role, const std::vector<int>& matrices,
                            int bias) { self.weights().set_linear(layer, role, matrices, bias); })
      .def("set_vector", [](Model& self, int layer, const std::string& role,
                            int vector) { self.weights().set_vector(layer, role, vector); })
      .def("set_embedding", [](Model& self, int matrix) { self.weights().set_embedding(matrix); })
      .def("step", step, nb::arg("batch"), nb::arg("samples"), nb::arg("output"), nb::arg("logits"),
           nb::arg("masks").none() = nb::none())
      .def("fill_cache", &Model::fill_cache)
      .def("set_profile", &Model::set_profile)
      .def("profile", profile)
      .def_prop_ro("weight_bytes_used", [](Model& self) { return self.weights().used(); })
      .def_prop_ro("workspace_bytes", &Model::workspace_size)
      .def_prop_ro("cache_bytes", &Model::cache_size);
  m.def("workspace_bytes",
        [](const ModelShape& shape, const Limits& limits) { return workspace_bytes(shape, limits, kernels()); });
  m.def("philox4x32", [](const std::vector<uint32_t>& counter, const std::vector<uint32_t>& key) {
    require(counter.size() == 4 && key.size() == 2, "four counter and two key words are needed");
    PhiloxBlock x = philox4x32({{counter[0], counter[1], counter[2], counter[3]}}, key[0], key[1]);
    return std::vector<uint32_t>(x.word, x.word + 4);
  });
}
